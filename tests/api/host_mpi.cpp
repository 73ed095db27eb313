// A program that owns MPI and hands its communicator to Capstan.
#include <doctest/doctest.h>
#include <mpi.h>
#include <unistd.h>

#include <filesystem>

#include "capstan/trainer.hpp"

using namespace capstan;

namespace {

namespace fs = std::filesystem;

Config tiny(int ranks) {
  Config config = Config::resolve(
      "quickstart",
      {"dataset=mock", "tokenizer=byte", "model.vocab_size=257", "model.num_layers=1", "model.hidden_size=32",
       "model.ffn_hidden_size=48", "model.num_attention_heads=4", "model.seq_length=16",
       "train.micro_batch_size=2", "train.global_batch_size=4", "train.train_iters=2"},
      ranks);
  INFO(config.diagnostics());
  REQUIRE(config.ok());
  return config;
}

ErrorCode code_of(const Config& config, const TrainOptions& options) {
  try {
    run_training(config, options);
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::internal;
}

}  // namespace

TEST_CASE("training on a communicator of the host") {
  MPI_Comm all = MPI_COMM_WORLD;
  CHECK(code_of(tiny(2), {.mpi_communicator = &all}) == ErrorCode::usage);  // MPI does not run yet

  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
  REQUIRE(provided >= MPI_THREAD_FUNNELED);
  int rank = 0, size = 0, parent = static_cast<int>(::getppid());
  MPI_Comm_rank(all, &rank);
  MPI_Comm_size(all, &size);
  MPI_Bcast(&parent, 1, MPI_INT, 0, all);
  const fs::path scratch = fs::temp_directory_path() / ("capstan-host-mpi-" + std::to_string(parent));

  // All ranks train together, twice.
  for (const char* name : {"a", "b"}) {
    const Outcome outcome = run_training(tiny(size), {.run_dir = scratch / name, .mpi_communicator = &all});
    CHECK(outcome.ended == Ended::finished);
    CHECK(outcome.step == 2);
  }
  CHECK(code_of(tiny(1), {.run_dir = scratch / "c", .mpi_communicator = &all}) == ErrorCode::usage);

  // Each rank trains a model of its own.
  MPI_Comm own = MPI_COMM_NULL;
  MPI_Comm_split(all, rank, 0, &own);
  const Outcome alone =
      run_training(tiny(1), {.run_dir = scratch / ("own-" + std::to_string(rank)), .mpi_communicator = &own});
  CHECK(alone.step == 2);
  MPI_Comm_free(&own);

  // MPI is still the host's, with its error handler.
  MPI_Errhandler handler = MPI_ERRHANDLER_NULL;
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &handler);
  CHECK(handler == MPI_ERRORS_ARE_FATAL);
  int finalized = 1, sum = 0;
  MPI_Finalized(&finalized);
  CHECK(!finalized);
  MPI_Allreduce(&size, &sum, 1, MPI_INT, MPI_SUM, all);
  CHECK(sum == size * size);
  if (rank == 0) fs::remove_all(scratch);
  MPI_Finalize();
}
