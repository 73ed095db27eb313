#include "importers/schedules.hpp"

#include <algorithm>
#include <array>

#include "base/text.hpp"

namespace capstan::importers {

namespace {

struct Name {
  std::string_view theirs, ours;
};
constexpr Name kSchedules[] = {
    {"linear", "linear"},
    {"cosine", "cosine"},
    {"cosine_with_min_lr", "cosine"},
    {"cosine_warmup_with_min_lr", "cosine"},
    {"constant", "constant"},
    {"constant_with_warmup", "constant"},
    {"inverse_sqrt", "inverse-square-root"},
    {"warmup_stable_decay", "WSD"},
};

// An option of a schedule, and the field that receives its value.
struct Option {
  std::string_view schedule, key, path;
};
constexpr Option kOptions[] = {
    {"cosine_with_min_lr", "min_lr", "optimizer.min_lr"},
    {"cosine_with_min_lr", "min_lr_rate", "optimizer.min_lr_ratio"},
    {"cosine_warmup_with_min_lr", "min_lr", "optimizer.min_lr"},
    {"cosine_warmup_with_min_lr", "min_lr_rate", "optimizer.min_lr_ratio"},
    {"warmup_stable_decay", "min_lr_ratio", "optimizer.min_lr_ratio"},
    {"warmup_stable_decay", "num_decay_steps", "scheduler.lr_wsd_decay_iters"},
    {"warmup_stable_decay", "num_warmup_steps", "scheduler.lr_warmup_iters"},
};

// Whether the draft has a warm-up other than 0.
bool has_warmup(const Draft& draft) {
  return std::ranges::any_of(
      std::array{"scheduler.lr_warmup_fraction", "scheduler.lr_warmup_iters"},
      [&](const char* path) { return draft.has(path) && parse_double(draft.text(path)) != 0.0; });
}

void read_option(Reader& reader, const std::string& type, const std::string& key, const SourceKey& from,
                 const config::Node& value) {
  if (value.kind == config::Node::Kind::null) {
    reader.draft.omit(from, value, OmissionReason::off, "null");
    return;
  }
  for (const Option& option : kOptions)
    if (option.schedule == type && option.key == key) {
      reader.draft.set(option.path, value, from);
      return;
    }
  if (type == "warmup_stable_decay" && key == "decay_type") {
    const bool root = value.text == "1-sqrt";
    if (root || value.text == "linear" || value.text == "cosine")
      reader.draft.set("scheduler.lr_wsd_decay_style", root ? "minus_sqrt" : value.text, from);
    else
      reader.draft.omit(from, value, OmissionReason::value,
                        "counterparts are known for: linear, cosine, 1-sqrt");
    return;
  }
  if (type == "warmup_stable_decay" && key == "num_stable_steps")
    reader.draft.omit(from, value, OmissionReason::no_effect, "what warm-up and decay leave of the run");
  else if (key == "num_cycles" && parse_double(value.text) == 0.5)
    reader.draft.omit(from, value, OmissionReason::same, "half a cosine");
  else
    reader.draft.omit(from, value, OmissionReason::to_fill_in, "see `capstan explain scheduler`");
}

}  // namespace

void transformers_schedule(Reader& reader, std::string_view key, const std::string& type) {
  for (const Name& name : kSchedules)
    if (name.theirs == type) {
      reader.set("scheduler.lr_decay_style", std::string(name.ours), key);
      return;
    }
  std::vector<std::string> known;
  for (const Name& name : kSchedules) known.emplace_back(name.theirs);
  reader.omit(key, type, OmissionReason::unsupported, "schedules are " + join(known, ", "),
              near_matches(type, known));
}

void transformers_schedule_options(Reader& reader, const std::string& type) {
  const std::string key = "lr_scheduler_kwargs";
  const config::Node* const options = reader.find(key);
  if (!options) return;
  if (options->kind != config::Node::Kind::map) {
    reader.omit(key, *options, is_off(*options) ? OmissionReason::off : OmissionReason::to_fill_in,
                "see `capstan explain scheduler`");
    return;
  }
  if (options->items.empty()) reader.omit(key, *options, OmissionReason::off, "");
  for (size_t i = 0; i < options->items.size(); ++i)
    read_option(reader, type, options->keys[i], {key + "." + options->keys[i], options->key_locations[i]},
                options->items[i]);
}

void transformers_schedule_defaults(Draft& draft, const std::string& type) {
  if (type == "warmup_stable_decay" && !draft.mentions("lr_scheduler_kwargs.decay_type"))
    draft.assume("scheduler.lr_wsd_decay_style", "cosine", "Transformers' default");
  if (type != "inverse_sqrt") return;
  if (!has_warmup(draft))
    draft.withdraw("scheduler.lr_decay_style", OmissionReason::unsupported,
                   "without a warm-up it is sqrt(10000 / (10000 + step)) in Transformers; "
                   "inverse-square-root here is that of a run with warmup_steps");
  else if (draft.mentions("lr_scheduler_kwargs.timescale"))
    draft.withdraw("scheduler.lr_decay_style", OmissionReason::unsupported,
                   "the time scale of inverse-square-root is the warm-up");
}

void transformers_warmup(Reader& reader) {
  Draft& draft = reader.draft;
  const auto steps = reader.real("warmup_steps");
  if (!steps) return;
  const SourceKey from = reader.from("warmup_steps");
  if (*steps > 0 && *steps < 1) {
    draft.set("scheduler.lr_warmup_fraction", *reader.find("warmup_steps"), from,
              "a value below 1 is a fraction");
  } else if (*steps >= 1) {
    draft.withdraw("scheduler.lr_warmup_fraction", OmissionReason::no_effect, "warmup_steps is given");
    draft.set("scheduler.lr_warmup_iters", *reader.find("warmup_steps"), from);
  } else {
    draft.omit(from, "0", OmissionReason::off, "");
  }
}

void transformers_length(Reader& reader, std::string_view epochs, const DefaultEpochs& otherwise) {
  const auto steps = reader.integer("max_steps");
  if (steps && *steps > 0) {
    reader.copy("train.train_iters", "max_steps");
    if (reader.given(epochs))
      reader.omit(epochs, OmissionReason::no_effect,
                  "max_steps sets the length, whatever the number of epochs");
    return;
  }
  if (steps) reader.omit("max_steps", std::to_string(*steps), OmissionReason::off, "");
  length_in_epochs(reader, epochs, otherwise);
}

void length_in_epochs(Reader& reader, std::string_view epochs, const DefaultEpochs& otherwise) {
  Draft& draft = reader.draft;
  const bool given = reader.real(epochs).has_value();
  if (draft.extends() || draft.has("dataset.train_files")) {
    if (given)
      reader.copy("train.epochs", epochs);
    else if (!otherwise.text.empty())
      draft.assume("train.epochs", otherwise.text, otherwise.reason);
    if (draft.has("train.epochs")) {
      if (draft.extends()) draft.assume("train.train_iters", "null", "the length is given in epochs");
      return;
    }
  } else if (given) {
    reader.omit(epochs, OmissionReason::to_fill_in,
                "epochs over data that the file does not name: set train.epochs");
  }
  draft.assume("train.train_iters", "1000", "to fill in: the file does not give the length of the run");
}

}  // namespace capstan::importers
