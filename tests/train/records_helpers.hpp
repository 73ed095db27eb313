// Helpers of the tests of run records.
#pragma once

#include <filesystem>

#include "base/error.hpp"
#include "tests/support/errors.hpp"
#include "tests/support/files.hpp"
#include "tests/support/temporary_directory.hpp"

namespace capstan::records::test {

namespace fs = std::filesystem;

using capstan::test::error_of;
using capstan::test::holds;
using capstan::test::slurp;
using capstan::test::spill;
using capstan::test::TemporaryDirectory;

}  // namespace capstan::records::test
