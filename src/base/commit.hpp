#pragma once

namespace capstan {

// The commit that this program was built from: 12 digits, and "-dirty" where tracked files differed from it.
// Empty if it was not built in a repository.
const char* program_commit();

}  // namespace capstan
