// Reading untrusted files starts no program, opens no shared object and makes no memory executable: a process
// that would be killed for any of these reads a file of every kind.
#include <doctest/doctest.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <functional>

#include "config/resolve/resolve.hpp"
#include "formats/external_model.hpp"
#include "formats/peft_adapter.hpp"
#include "tests/formats/helpers.hpp"
#include "text/chat/chat_template.hpp"
#include "text/tokenizer/tokenizer.hpp"

using namespace capstan;
using test::kFormatFixtures;
namespace fs = std::filesystem;

namespace {

// From here on these end the process: execve, execveat, mmap and mprotect that ask for executable pages. A
// shared object cannot be loaded without the latter.
void forbid_execution() {
  constexpr auto word = [](size_t offset) { return static_cast<uint32_t>(offset); };
  constexpr uint32_t number = word(offsetof(seccomp_data, nr)),
                     protection = word(offsetof(seccomp_data, args) + 2 * sizeof(uint64_t));
  sock_filter rules[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, number),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_execve, 6, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_execveat, 5, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_mmap, 1, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_mprotect, 0, 2),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, protection),
      BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, PROT_EXEC, 1, 0),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
  };
  const sock_fprog program{sizeof rules / sizeof rules[0], rules};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
    std::_Exit(77);
}

// Runs `body` in a process that must not execute anything new. Returns 0, -1 for an error, or the number of
// the signal that ended it.
int alone(const std::function<void()>& body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    forbid_execution();
    try {
      body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      std::_Exit(1);
    }
    std::_Exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? WTERMSIG(status) : -WEXITSTATUS(status);
}

}  // namespace

TEST_CASE("artifacts of every kind are read without executing anything") {
  for (const auto& family : fs::directory_iterator(kFormatFixtures / "families")) {
    CAPTURE(family.path().string());
    const std::string name = "hf:" + family.path().string();
    CHECK(
        alone([&] {
          const auto model = formats::ExternalModel::open(name);
          const auto weights = model->parameters(model->model());
          for (const auto& parameter : weights->names()) {
            std::vector<std::byte> bytes(static_cast<size_t>(4 * weights->at(parameter).shape.elements()));
            weights->read_all(parameter, DType::f32, bytes);
          }
          if (!model->tokenizer().empty())
            text::Tokenizer::load(family.path())->decode(text::Tokenizer::load(family.path())->encode("a b"));
          formats::resolve_recipe(*model);
        }) == 0);
  }
  for (const auto& adapter : fs::directory_iterator(kFormatFixtures / "adapters")) {
    CAPTURE(adapter.path().string());
    CHECK(alone([&] { formats::read_peft(adapter.path()); }) == 0);
  }
  CHECK(alone([] {
          const auto model =
              formats::ExternalModel::open("gguf:" + (kFormatFixtures / "gguf/smollm2.gguf").string());
          const auto weights = model->parameters(model->model());
          std::vector<std::byte> bytes(
              static_cast<size_t>(4 * weights->at("embedding.word_embeddings.weight").shape.elements()));
          weights->read_all("embedding.word_embeddings.weight", DType::f32, bytes);
        }) == 0);
  CHECK(alone([] {
          text::chat::ChatTemplate::load(
              (kFormatFixtures.parent_path() / "text/chat/templates/llama3.2.jinja").string());
        }) == 0);
  CHECK(alone([] {
          config::Request request;
          request.recipe = "quickstart";
          config::resolve(request);
        }) == 0);
  // The sandbox works: a forbidden call ends the process.
  CHECK(alone([] { execl("/bin/true", "true", nullptr); }) == SIGSYS);
  CHECK(alone([] {
          mmap(nullptr, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        }) == SIGSYS);
}
