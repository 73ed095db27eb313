// Finds and opens the CUDA backend, a shared object beside the program.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tensor/cuda_backend.hpp"

namespace capstan::cuda {

struct Library {
  // Null: it cannot be used.
  const Backend* backend = nullptr;
  // Whether the object was found, also where it cannot be used.
  bool found = false;
  // Why there is no backend: a sentence, and what to do about it.
  std::string reason, help;
};

// Where the object is looked for: the file that CAPSTAN_CUDA_BACKEND names (for programs that embed the
// library), or, in order, ../lib/capstan beside the program's directory (installed), and the program's
// directory (a build).
std::vector<std::filesystem::path> library_paths();

// Opens the first object that exists. It stays open.
Library open_library(const std::vector<std::filesystem::path>& paths);

// The object of library_paths(), opened by the first call.
const Library& library();

}  // namespace capstan::cuda
