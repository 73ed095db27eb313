#include "train/records/run_list.hpp"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "checkpoint/store.hpp"
#include "train/records/metrics.hpp"

namespace capstan::records {

namespace fs = std::filesystem;

RunFile read_run_file(const fs::path& run) {
  const fs::path path = run / kRunFile;
  const std::string text = read_file(path, 1 << 20);
  const Json value = json_of(text, IfNotJson::discard);
  if (!value.is_object()) fail(ErrorCode::format, "`" + path.string() + "` is not a JSON object");
  const auto text_of = [&](const char* key) {
    const auto found = value.find(key);
    if (found == value.end() || !found->is_string())
      fail(ErrorCode::format, "`" + path.string() + "`: `" + key + "` is not a string");
    return found->get<std::string>();
  };
  if (text_of("schema") != kRunSchema)
    fail(ErrorCode::format, "`" + path.string() + "` has the schema " + in_quotes(text_of("schema")) +
                                ", not " + in_quotes(kRunSchema));
  RunFile file{text_of("id"),
               text_of("recipe"),
               text_of("checkpoints"),
               text_of("created"),
               text_of("started"),
               text_of("ended"),
               text_of("state"),
               text_of("reason"),
               0,
               {},
               {},
               0,
               {},
               {}};
  if (const auto at = value.find("layout"); at != value.end() && at->is_string()) file.layout = *at;
  if (const auto at = value.find("data"); at != value.end() && at->is_string()) file.data = *at;
  if (const auto at = value.find("ranks"); at != value.end() && at->is_number_unsigned()) file.ranks = *at;
  if (const auto at = value.find("seed"); at != value.end() && at->is_number_integer())
    file.seed = at->get<int64_t>();
  if (const auto at = value.find("steps"); at != value.end() && at->is_number_unsigned())
    file.steps = at->get<int64_t>();
  if (const auto starts = value.find("starts"); starts != value.end() && starts->is_number_unsigned())
    file.starts = starts->get<int64_t>();
  return file;
}

std::string run_file_text(const RunFile& file) {
  const auto line = [](const char* key, const std::string& value) {
    return std::string("  \"") + key + "\": " + in_quotes(value) + ",\n";
  };
  return "{\n" + line("schema", std::string(kRunSchema)) + line("id", file.id) + line("recipe", file.recipe) +
         line("checkpoints", file.checkpoints) + line("created", file.created) +
         line("started", file.started) + line("ended", file.ended) + line("state", file.state) +
         line("reason", file.reason) + line("layout", file.layout) + line("data", file.data) +
         (file.ranks > 0 ? "  \"ranks\": " + std::to_string(file.ranks) + ",\n" : "") +
         (file.seed ? "  \"seed\": " + std::to_string(*file.seed) + ",\n" : "") +
         (file.steps ? "  \"steps\": " + std::to_string(*file.steps) + ",\n" : "") +
         "  \"starts\": " + std::to_string(file.starts) + "\n}\n";
}

std::string_view name_of(RunState state) {
  switch (state) {
    case RunState::running:
      return "running";
    case RunState::finished:
      return "finished";
    case RunState::stopped:
      return "stopped";
    case RunState::killed:
      return "killed";
    case RunState::failed:
      return "failed";
  }
  return "";
}

bool is_run(const fs::path& path) {
  std::error_code error;
  return fs::is_regular_file(path / kRunFile, error);
}

void require_run(const fs::path& path) {
  if (is_run(path)) return;
  std::vector<std::string> names;
  const auto list = [&](const fs::path& directory) {
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(directory.empty() ? "." : directory, error))
      if (is_run(entry.path())) names.push_back((directory / entry.path().filename()).string());
  };
  const fs::path parent = path.parent_path();
  list(parent);
  if (parent != "runs") list("runs");
  auto near = near_matches(path.string(), names, 2);
  // `quickstart` means `runs/quickstart`.
  for (const std::string& name : names)
    if (near.empty() && fs::path(name).filename() == path.filename()) near.push_back(name);
  for (std::string& name : near) name = "`" + name + "`";
  fail(ErrorCode::not_found, "there is no run `" + path.string() + "` to resume",
       (near.empty() ? "" : "did you mean " + join(near, " or ") + "? ") + "{start}");
}

fs::path saved_in(const fs::path& path) {
  if (!is_run(path)) return path;
  const fs::path named = read_run_file(path).checkpoints;
  const fs::path directory = named.empty()         ? path / "checkpoints"
                             : named.is_absolute() ? named
                                                   : path / named;
  std::error_code none_yet;
  return fs::is_directory(directory, none_yet) ? directory : path;
}

static bool is_locked(const fs::path& run) {
  const FileDescriptor file(::open((run / "lock").c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  return file.get() >= 0 && ::flock(file.get(), LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
}

// "runs/a/" and "runs/a" and "." have the name of the directory that they are.
static std::string directory_name(const fs::path& path) {
  std::error_code error;
  const fs::path full = fs::weakly_canonical(path, error);
  return (error ? path : full).filename().string();
}

RunSummary summarize(const fs::path& run) {
  const RunFile file = read_run_file(run);
  RunSummary summary;
  summary.name = directory_name(run);
  summary.path = run;
  summary.reason = file.reason;
  summary.recipe = file.recipe;
  summary.started = file.started;
  summary.ended = file.ended;
  if (is_locked(run))
    summary.state = RunState::running;
  else if (file.state == "finished")
    summary.state = RunState::finished;
  else if (file.state == "failed")
    summary.state = RunState::failed;
  else
    summary.state = file.state == "running" ? RunState::killed : RunState::stopped;
  if (summary.state == RunState::killed && summary.reason.empty()) summary.reason = kUnknownEnd;
  summary.file = file;
  if (const auto row = last_logged_step(run / "metrics.jsonl")) {
    summary.step = summary.logged_step = row->step;
    if (const double loss = row->number("loss"); std::isfinite(loss)) summary.last_loss = loss;
  }
  if (const auto row = last_recorded_step(run / "metrics.jsonl"))
    summary.step = std::max(row->step, summary.step);
  for (const auto& checkpoint : checkpoint::list_checkpoints(run / file.checkpoints))
    summary.checkpoints.push_back(checkpoint.step);
  return summary;
}

std::vector<RunSummary> list_runs(const fs::path& root) {
  std::error_code error;
  std::vector<RunSummary> runs;
  for (fs::directory_iterator entry(root, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    if (!is_run(entry->path())) continue;
    try {
      runs.push_back(summarize(entry->path()));
    } catch (const Error& problem) {
      RunSummary broken;
      broken.name = entry->path().filename().string();
      broken.path = entry->path();
      broken.state = RunState::failed;
      broken.reason = problem.message();
      broken.readable = false;
      runs.push_back(std::move(broken));
    }
  }
  if (error && error != std::errc::no_such_file_or_directory)
    fail(ErrorCode::io, "cannot read directory `" + root.string() + "`: " + error.message());
  std::sort(runs.begin(), runs.end(), [](const RunSummary& a, const RunSummary& b) {
    return a.started != b.started ? a.started > b.started : a.name < b.name;
  });
  return runs;
}

RunDetails details_of(const fs::path& run) {
  const fs::path metrics = run / "metrics.jsonl";
  RunDetails details;
  const auto known = [](double value) { return std::isfinite(value) ? std::optional(value) : std::nullopt; };
  if (const auto row = last_logged_step(metrics)) {
    if (const auto tokens = known(row->number("consumed_tokens")))
      details.tokens = static_cast<int64_t>(*tokens);
    details.tokens_per_second = known(row->number("tokens_per_second"));
    details.mfu = known(row->number("mfu"));
    details.memory = known(row->memory_bytes());
  }
  if (const auto row = last_event(metrics, "estimate")) {
    details.memory_estimated = known(row->number("memory_estimated_bytes"));
    details.step_seconds = known(row->number("step_seconds"));
    details.step_estimated_seconds = known(row->number("step_estimated_seconds"));
    details.pipeline_bubble = known(row->number("pipeline_bubble"));
    details.pipeline_bubble_simulated = known(row->number("pipeline_bubble_simulated"));
    for (const auto& [key, text] : row->texts)
      if (key == "cluster") details.cluster = text;
  }
  if (const auto row = last_event(metrics, "validation")) {
    details.validation_step = row->step;
    details.validation_loss = known(row->number("loss"));
    details.perplexity = known(row->number("perplexity"));
  }
  if (const auto row = last_event(metrics, "test")) details.test_loss = known(row->number("loss"));
  return details;
}

static OrderedJson json_of(const RunSummary& run) {
  return {{"name", run.name},
          {"path", run.path.string()},
          {"state", name_of(run.state)},
          {"reason", run.reason},
          {"recipe", run.recipe},
          {"started", run.started},
          {"ended", run.ended},
          {"step", or_null(run.step)},
          {"logged_step", or_null(run.logged_step)},
          {"last_loss", or_null(run.last_loss)},
          {"checkpoints", run.checkpoints}};
}

std::string to_json(const RunSummary& run, const RunDetails& details) {
  OrderedJson object = json_of(run);
  object["layout"] = run.file.layout;
  object["data"] = run.file.data;
  object["ranks"] = run.file.ranks > 0 ? OrderedJson(run.file.ranks) : OrderedJson();
  object["seed"] = or_null(run.file.seed);
  object["steps"] = or_null(run.file.steps);
  object["starts"] = run.file.starts;
  object["tokens"] = or_null(details.tokens);
  object["tokens_per_second"] = or_null(details.tokens_per_second);
  object["mfu"] = or_null(details.mfu);
  const auto bytes = [](const std::optional<double>& value) {
    return value ? OrderedJson(static_cast<int64_t>(*value)) : OrderedJson();
  };
  object["memory_bytes"] = bytes(details.memory);
  object["memory_estimated_bytes"] = bytes(details.memory_estimated);
  object["first_steps_seconds"] = or_null(details.step_seconds);
  object["step_estimated_seconds"] = or_null(details.step_estimated_seconds);
  object["cluster"] = details.cluster.empty() ? OrderedJson() : OrderedJson(details.cluster);
  object["pipeline_bubble"] = or_null(details.pipeline_bubble);
  object["pipeline_bubble_simulated"] = or_null(details.pipeline_bubble_simulated);
  object["validation_step"] = or_null(details.validation_step);
  object["validation_loss"] = or_null(details.validation_loss);
  object["perplexity"] = or_null(details.perplexity);
  object["test_loss"] = or_null(details.test_loss);
  return dump_json(object);
}

std::string to_json(std::span<const RunSummary> runs) {
  std::string text = "[";
  for (size_t i = 0; i < runs.size(); ++i)
    text += std::string(i ? ",\n " : "\n ") + dump_json(json_of(runs[i]));
  return text + (runs.empty() ? "]\n" : "\n]\n");
}

}  // namespace capstan::records
