// Lines for the log: what a library has not computed, and why. A kernel of Capstan computes it instead.
#pragma once

#include <string>

namespace capstan::kernels::CAPSTAN_GPU {

// Each text once in a process.
void add_note(const std::string& text);
// The next one that has not been read; null: there is none. Texts live as long as the process.
const char* next_note();

}  // namespace capstan::kernels::CAPSTAN_GPU
