#pragma once

namespace capstan {

// The commit that this program was configured at, 12 digits; empty if it was not built in a repository.
const char* program_commit();

}  // namespace capstan
