#include "sweep/ask_tell.hpp"

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "sweep/json.hpp"
#include "sweep/values.hpp"
#include "train/records/metrics.hpp"

namespace capstan::sweep {

namespace {

namespace fs = std::filesystem;

OrderedJson object_of(std::string_view line, std::initializer_list<const char*> known, const char* example) {
  OrderedJson object = ordered_json_of(line, IfNotJson::discard);
  if (!object.is_object())
    fail(ErrorCode::usage, "`" + std::string(line.substr(0, 100)) + "` is not a JSON object",
         std::string("for example ") + example);
  const std::vector<std::string> names(known.begin(), known.end());
  for (const auto& [key, value] : object.items())
    if (std::find(names.begin(), names.end(), key) == names.end())
      fail(ErrorCode::usage, "unknown key `" + key + "`", near_help(key, names, "known keys: "));
  return object;
}

std::string dumped(const OrderedJson& object) {
  return dump_json(object) + "\n";
}

std::optional<int64_t> integer_of(const OrderedJson& object, const char* key) {
  if (!object.contains(key) || object[key].is_null()) return std::nullopt;
  if (!object[key].is_number_integer())
    fail(ErrorCode::usage, "`" + std::string(key) + "` is not an integer");
  return object[key].get<int64_t>();
}
std::string text_member(const OrderedJson& object, const char* key) {
  if (!object.contains(key) || object[key].is_null()) return {};
  if (!object[key].is_string()) fail(ErrorCode::usage, "`" + std::string(key) + "` is not a string");
  return object[key].get<std::string>();
}

// The value as the right side of an override.
std::string value_text(const std::string& path, const OrderedJson& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number_float()) return to_text(value.get<double>());
  if (value.is_primitive()) return dump_json(value);
  fail(ErrorCode::usage, "the value of `" + path + "` is not a number, string, true, false or null");
}

OrderedJson description(const Store& store, const TrialPlan& trial, bool is_new) {
  const fs::path directory = fs::absolute(store.directory()).lexically_normal();
  return {{"trial", trial.id},
          {"label", trial.label},
          {"values", json_of(trial.values)},
          {"seed", or_null(trial.seed)},
          {"state", name_of(store.state(trial.id))},
          {"recipe", (directory / "trials" / trial.id / "recipe.yaml").string()},
          {"command", {"sweep", "run", directory.string(), "--trial", trial.id}},
          {"new", is_new}};
}

OrderedJson standing(const Store& store, const TrialPlan& trial) {
  const TrialStatus status = store.status(trial);
  OrderedJson object{{"trial", trial.id},
                     {"state", name_of(status.state)},
                     {"value", or_null(status.metric)},
                     {"step", or_null(status.step)}};
  if (!status.reason.empty()) object["reason"] = status.reason;
  return object;
}

// The metric as a row of the run's metrics, where read_curve looks for it.
void write_metric(const Store& store, const TrialPlan& trial, int64_t step, double value) {
  const std::string& name = store.plan().definition.metric.name;
  const size_t slash = name.find('/');
  fs::create_directories(store.run(trial.id));
  records::MetricsWriter writer(store.run(trial.id) / "metrics.jsonl");
  if (slash == std::string::npos) {
    writer.write(records::MetricsRow(step).number(name, value));
  } else {
    const std::string event = name.substr(0, slash);
    writer.write(records::MetricsRow(step, event == "val" ? "validation" : event)
                     .number(name.substr(slash + 1), value));
  }
  writer.sync();
}

}  // namespace

std::string ask(Store& store, std::string_view line, std::set<std::string>& given) {
  const OrderedJson request =
      object_of(line, {"values", "seed"}, R"({"values": {"optimizer.lr": 3e-4}, "seed": 1})");
  if (request.contains("values")) {
    if (!request["values"].is_object())
      fail(ErrorCode::usage, "`values` is not an object of field paths and values");
    Values values;
    for (const auto& [path, value] : request["values"].items())
      values.emplace_back(path, value_text(path, value));
    const size_t before = store.plan().trials.size();
    const TrialPlan trial = add_trial(store.directory(), values, integer_of(request, "seed"));
    store = Store(store.directory());
    given.insert(trial.id);
    return dumped(description(store, trial, store.plan().trials.size() > before));
  }
  if (request.contains("seed")) fail(ErrorCode::usage, "`seed` comes with `values`");
  store.refresh();
  for (const TrialPlan& trial : store.plan().trials) {
    const State state = store.state(trial.id);
    if ((state != State::pending && state != State::lost) || given.contains(trial.id)) continue;
    given.insert(trial.id);
    return dumped(description(store, trial, false));
  }
  return dumped({{"trial", nullptr}});
}

std::string tell(Store& store, std::string_view line) {
  const OrderedJson request = object_of(line, {"trial", "value", "step", "state", "reason"},
                                        R"({"trial": "3f9c1a7e", "value": 2.5})");
  const std::string id = text_member(request, "trial");
  if (id.empty()) fail(ErrorCode::usage, "`trial` is missing");
  if (!store.plan().find(id)) store.refresh();
  const TrialPlan* const trial = store.plan().find(id);
  if (!trial) store.plan().fail_no_trial(id);
  const bool has_value = request.contains("value") && !request["value"].is_null();
  if (!has_value && !request.contains("state")) {
    if (request.contains("value"))
      fail(ErrorCode::usage, "`value` is null", "report a trial without a result as {\"state\": \"failed\"}");
    for (const char* key : {"step", "reason"})
      if (request.contains(key))
        fail(ErrorCode::usage, "`" + std::string(key) + "` comes with `value` or `state`");
    return dumped(standing(store, *trial));
  }
  if (has_value && !request["value"].is_number()) fail(ErrorCode::usage, "`value` is not a number");
  const std::string word = request.contains("state") ? text_member(request, "state") : "done";
  State state = State::done;
  if (word == "failed")
    state = State::failed;
  else if (word == "pruned")
    state = State::pruned;
  else if (word != "done")
    fail(ErrorCode::usage, "`state` is done, failed or pruned, not `" + word + "`");
  const auto step = integer_of(request, "step");
  if (step && *step < 0)
    fail(ErrorCode::usage, "`step` is " + std::to_string(*step) + ": it must be at least 0");
  if (state == State::done && !has_value) fail(ErrorCode::usage, "a trial that is done has a `value`");

  const auto at = step ? step : store.total_steps(*trial);
  if (has_value && !at)
    fail(ErrorCode::usage, "`step` is missing: how many steps trial `" + trial->id + "` has is not known");

  const auto lock = TrialLock::try_take(store.trial(trial->id));
  if (!lock)
    fail(ErrorCode::failed, "another process holds trial `" + trial->id +
                                "`: " + holder_of(store.trial(trial->id)).value_or(LockHolder{}).text);
  if (store.state(trial->id) == State::done)
    fail(ErrorCode::failed, "trial `" + trial->id + "` is done already", "its result stays");
  const int64_t attempt = store.begin_attempt(trial->id);
  if (has_value) write_metric(store, *trial, *at, request["value"].get<double>());
  std::string reason = text_member(request, "reason");
  if (reason.empty() && state != State::done) reason = "reported by sweep tell";
  const OrderedJson result{{"state", name_of(state)}, {"reason", reason}, {"reported", true}};
  write_file_durably(store.attempt(trial->id, attempt) / "result.json", dump_json(result, 1) + "\n");
  store.change(trial->id, {state, attempt, reason, std::nullopt});
  return dumped(standing(store, *trial));
}

}  // namespace capstan::sweep
