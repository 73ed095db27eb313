#include <string>
#include <vector>

#include "cli/program.hpp"

int main(int argc, char** argv) {
  std::vector<std::string> command(argv, argv + argc);
  if (command.empty()) command.emplace_back("capstan");
  return capstan::cli::run_program(command);
}
