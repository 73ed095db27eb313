#include "train/trainer/run_schedule.hpp"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "base/error.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "config/core/field.hpp"
#include "config/resolve/resolve.hpp"
#include "train/trainer/schedule_setup.hpp"

namespace capstan::train {

namespace {

using config::enum_name;

// The batch size where it is constant, else 0.
int64_t constant_batch(const config::BatchRamp& ramp) {
  return ramp.grows() ? 0 : ramp.size_at(0);
}

std::string steps_text(int64_t samples, int64_t batch) {
  if (batch == 0 || samples % batch != 0) return std::to_string(samples) + " samples";
  return std::to_string(samples / batch) + (samples == batch ? " step" : " steps");
}

// The batch by which messages divide lengths: 0, for samples, where one of them is not a number of steps.
int64_t batch_of_lengths(const RunSchedule& schedule, const config::BatchRamp& ramp) {
  const int64_t batch = constant_batch(ramp);
  const optim::ScheduleOptions& o = schedule.options;
  const bool steps = batch > 0 && o.warmup_samples % batch == 0 && o.decay_samples % batch == 0 &&
                     o.wsd_decay_samples % batch == 0 && o.weight_decay_samples % batch == 0;
  return steps ? batch : 0;
}

std::string number_text(const std::optional<double>& value) {
  return value ? to_text(*value) : "null";
}

// A value of the schedule, and the fields of a recipe that decide it. Two values are the same where their
// texts are.
struct ScheduleValue {
  // Fields of a recipe that decide the value.
  std::vector<std::string_view> fields;
  // Field that gives the value as a fraction of the decay length; empty: there is none.
  std::string_view fraction_field;
  std::string (*text)(const RunSchedule&, int64_t batch);
  void (*copy)(const RunSchedule& from, RunSchedule& to);
  // In messages: the first field, or in a run whose length is in samples the one in samples.
  std::string_view name(bool in_samples) const {
    const auto found =
        std::ranges::find_if(fields, [&](std::string_view f) { return f.ends_with("_samples"); });
    return in_samples && found != fields.end() ? *found : fields.front();
  }
};

const ScheduleValue kValues[] = {
    {{"scheduler.lr_decay_style"},
     "",
     [](const RunSchedule& s, int64_t) { return std::string(enum_name(s.options.style)); },
     [](const RunSchedule& from, RunSchedule& to) { to.options.style = from.options.style; }},
    {{"scheduler.lr_wsd_decay_style"},
     "",
     [](const RunSchedule& s, int64_t) { return std::string(enum_name(s.options.wsd_style)); },
     [](const RunSchedule& from, RunSchedule& to) { to.options.wsd_style = from.options.wsd_style; }},
    {{"scheduler.weight_decay_incr_style"},
     "",
     [](const RunSchedule& s, int64_t) { return std::string(enum_name(s.options.weight_decay_style)); },
     [](const RunSchedule& from, RunSchedule& to) {
       to.options.weight_decay_style = from.options.weight_decay_style;
     }},
    {{"optimizer.lr"},
     "",
     [](const RunSchedule& s, int64_t) { return to_text(s.options.max_lr); },
     [](const RunSchedule& from, RunSchedule& to) { to.options.max_lr = from.options.max_lr; }},
    {{"optimizer.min_lr", "optimizer.min_lr_ratio"},
     "",
     [](const RunSchedule& s, int64_t) { return to_text(s.options.min_lr); },
     [](const RunSchedule& from, RunSchedule& to) { to.options.min_lr = from.options.min_lr; }},
    {{"optimizer.decoupled_lr"},
     "",
     [](const RunSchedule& s, int64_t) { return number_text(s.decoupled_lr); },
     [](const RunSchedule& from, RunSchedule& to) { to.decoupled_lr = from.decoupled_lr; }},
    {{"optimizer.decoupled_min_lr"},
     "",
     [](const RunSchedule& s, int64_t) { return number_text(s.decoupled_min_lr); },
     [](const RunSchedule& from, RunSchedule& to) { to.decoupled_min_lr = from.decoupled_min_lr; }},
    {{"scheduler.lr_warmup_init"},
     "",
     [](const RunSchedule& s, int64_t) { return to_text(s.options.init_lr); },
     [](const RunSchedule& from, RunSchedule& to) { to.options.init_lr = from.options.init_lr; }},
    {{"scheduler.lr_decay_iters", "scheduler.lr_decay_samples"},
     "",
     [](const RunSchedule& s, int64_t batch) { return steps_text(s.options.decay_samples, batch); },
     [](const RunSchedule& from, RunSchedule& to) { to.options.decay_samples = from.options.decay_samples; }},
    {{"scheduler.lr_warmup_iters", "scheduler.lr_warmup_samples"},
     "scheduler.lr_warmup_fraction",
     [](const RunSchedule& s, int64_t batch) { return steps_text(s.options.warmup_samples, batch); },
     [](const RunSchedule& from, RunSchedule& to) {
       to.options.warmup_samples = from.options.warmup_samples;
       to.lr_warmup_fraction = from.lr_warmup_fraction;
     }},
    {{"scheduler.lr_wsd_decay_iters", "scheduler.lr_wsd_decay_samples"},
     "scheduler.lr_wsd_decay_fraction",
     [](const RunSchedule& s, int64_t batch) { return steps_text(s.options.wsd_decay_samples, batch); },
     [](const RunSchedule& from, RunSchedule& to) {
       to.options.wsd_decay_samples = from.options.wsd_decay_samples;
       to.lr_wsd_decay_fraction = from.lr_wsd_decay_fraction;
     }},
    {{"scheduler.start_weight_decay", "optimizer.weight_decay"},
     "",
     [](const RunSchedule& s, int64_t) { return to_text(s.options.start_weight_decay); },
     [](const RunSchedule& from, RunSchedule& to) {
       to.options.start_weight_decay = from.options.start_weight_decay;
     }},
    {{"scheduler.end_weight_decay", "optimizer.weight_decay"},
     "",
     [](const RunSchedule& s, int64_t) { return to_text(s.options.end_weight_decay); },
     [](const RunSchedule& from, RunSchedule& to) {
       to.options.end_weight_decay = from.options.end_weight_decay;
     }},
    {{"train.train_iters (the length over which weight decay grows)"},
     "",
     [](const RunSchedule& s, int64_t batch) { return steps_text(s.options.weight_decay_samples, batch); },
     [](const RunSchedule& from, RunSchedule& to) {
       to.options.weight_decay_samples = from.options.weight_decay_samples;
     }},
};

bool holds(const std::vector<std::string>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// True if no curve of this schedule reads the field.
bool is_idle(const ScheduleValue& value, const RunSchedule& schedule) {
  const std::string_view field = value.fields.front();
  if (field.starts_with("scheduler.lr_wsd_")) return schedule.options.style != config::LrDecayStyle::wsd;
  return field.starts_with("train.train_iters") &&
         schedule.options.weight_decay_style == config::WeightDecayStyle::constant;
}

bool is_decay_length(const ScheduleValue& value) {
  return value.fields.front() == "scheduler.lr_decay_iters";
}

// Sets a field in the text of a resolved recipe; path: "scheduler.lr_warmup_iters".
void write_field(std::string& recipe, const std::string& path, const std::string& value) {
  const size_t dot = path.find('.');
  const std::string section = "\n" + path.substr(0, dot) + ":\n", field = "  " + path.substr(dot + 1) + ": ",
                    line = field + value + "  # the run's schedule\n";
  const size_t found = recipe.find(section);
  if (found == std::string::npos) return;
  const size_t begin = found + section.size();
  for (size_t at = begin; recipe.compare(at, 2, "  ") == 0;) {
    const size_t next = recipe.find('\n', at) + 1;
    if (recipe.compare(at, field.size(), field) == 0) {
      recipe.replace(at, next - at, line);
      return;
    }
    at = next;
  }
  recipe.insert(begin, line);
}

// Writes the learning-rate and weight-decay fields (lengths excepted) in which `followed` differs from `own`.
void write_curves(std::string& recipe, const RunSchedule& own, const RunSchedule& followed) {
  const optim::ScheduleOptions &before = own.options, &now = followed.options;
  const auto write = [&](const char* path, const std::string& value, const std::string& now_value) {
    if (value != now_value) write_field(recipe, path, now_value);
  };
  const auto number = [&](const char* path, double value, double now_value) {
    write(path, to_text(value), to_text(now_value));
  };
  const bool constant = now.style == config::LrDecayStyle::constant;
  write("scheduler.lr_decay_style", std::string(enum_name(before.style)), std::string(enum_name(now.style)));
  if (now.style == config::LrDecayStyle::wsd)
    write("scheduler.lr_wsd_decay_style", std::string(enum_name(before.wsd_style)),
          std::string(enum_name(now.wsd_style)));
  number("optimizer.lr", before.max_lr, now.max_lr);
  number("scheduler.lr_warmup_init", before.init_lr, now.init_lr);
  if (!constant && before.min_lr != now.min_lr) {
    write_field(recipe, "optimizer.min_lr", to_text(now.min_lr));
    write_field(recipe, "optimizer.min_lr_ratio", "null");
  }
  write("optimizer.decoupled_lr", number_text(own.decoupled_lr), number_text(followed.decoupled_lr));
  write("optimizer.decoupled_min_lr", number_text(own.decoupled_min_lr),
        number_text(followed.decoupled_min_lr));
  write("scheduler.weight_decay_incr_style", std::string(enum_name(before.weight_decay_style)),
        std::string(enum_name(now.weight_decay_style)));
  if (now.weight_decay_style == config::WeightDecayStyle::constant) {
    number("optimizer.weight_decay", before.end_weight_decay, now.end_weight_decay);
  } else if (before.weight_decay_style != now.weight_decay_style ||
             before.start_weight_decay != now.start_weight_decay ||
             before.end_weight_decay != now.end_weight_decay) {
    write_field(recipe, "scheduler.start_weight_decay", to_text(now.start_weight_decay));
    write_field(recipe, "scheduler.end_weight_decay", to_text(now.end_weight_decay));
  }
}

}  // namespace

optim::Schedule RunSchedule::schedule() const {
  return optim::Schedule(options);
}

optim::Schedule RunSchedule::decoupled_schedule() const {
  optim::ScheduleOptions own = options;
  if (decoupled_lr) own.max_lr = *decoupled_lr, own.min_lr = decoupled_min_lr.value_or(0.0);
  return optim::Schedule(own);
}

RunSchedule schedule_of(const config::Config& config, const RecipeRecord& record) {
  RunSchedule schedule;
  schedule.options = make_schedule(config, false).options();
  schedule.decoupled_lr = config.optimizer.decoupled_lr;
  if (schedule.decoupled_lr) schedule.decoupled_min_lr = config.optimizer.decoupled_min_lr;
  schedule.lr_warmup_fraction = config.scheduler.lr_warmup_fraction;
  schedule.lr_wsd_decay_fraction = config.scheduler.lr_wsd_decay_fraction;
  for (const std::string& field : record.from_command_line)
    if (field.starts_with("scheduler.") || field.starts_with("optimizer."))
      schedule.from_command_line.push_back(field);
  return schedule;
}

std::string schedule_text(const RunSchedule& s) {
  const optim::ScheduleOptions& o = s.options;
  OrderedJson json{{"lr_decay_style", enum_name(o.style)},
                   {"lr_wsd_decay_style", enum_name(o.wsd_style)},
                   {"weight_decay_incr_style", enum_name(o.weight_decay_style)},
                   {"lr", o.max_lr},
                   {"min_lr", o.min_lr},
                   {"lr_warmup_init", o.init_lr},
                   {"lr_warmup_samples", o.warmup_samples},
                   {"lr_decay_samples", o.decay_samples},
                   {"lr_wsd_decay_samples", o.wsd_decay_samples},
                   {"weight_decay_samples", o.weight_decay_samples},
                   {"start_weight_decay", o.start_weight_decay},
                   {"end_weight_decay", o.end_weight_decay}};
  const auto optional = [&](const char* key, const std::optional<double>& value) {
    if (value) json[key] = *value;
  };
  optional("decoupled_lr", s.decoupled_lr);
  optional("decoupled_min_lr", s.decoupled_min_lr);
  optional("lr_warmup_fraction", s.lr_warmup_fraction);
  optional("lr_wsd_decay_fraction", s.lr_wsd_decay_fraction);
  if (!s.from_command_line.empty()) json["from_command_line"] = s.from_command_line;
  return dump_json(json);
}

RunSchedule parse_schedule(const std::string& text, const std::string& location) {
  const auto json = json_of(text, IfNotJson::discard);
  const auto wrong = [&](const std::string& key) {
    fail(ErrorCode::format, location + ": `schedule." + key + "` is missing or of the wrong type");
  };
  if (!json.is_object()) wrong("");
  const auto real = [&](const char* key) {
    if (!json.contains(key) || !json[key].is_number()) wrong(key);
    return json[key].get<double>();
  };
  const auto count = [&](const char* key) {
    if (!json.contains(key) || !json[key].is_number_integer() || json[key].get<int64_t>() < 0) wrong(key);
    return json[key].get<int64_t>();
  };
  const auto optional = [&](const char* key) {
    return json.contains(key) ? std::optional<double>(real(key)) : std::nullopt;
  };
  const auto name = [&]<class E>(const char* key, E& value) {
    const config::EnumTable::Entry* entry =
        json.contains(key) && json[key].is_string()
            ? config::enum_table<E>().find(json[key].template get_ref<const std::string&>())
            : nullptr;
    if (!entry) wrong(key);
    value = static_cast<E>(entry->value);
  };
  RunSchedule s;
  optim::ScheduleOptions& o = s.options;
  name("lr_decay_style", o.style);
  name("lr_wsd_decay_style", o.wsd_style);
  name("weight_decay_incr_style", o.weight_decay_style);
  o.max_lr = real("lr"), o.min_lr = real("min_lr"), o.init_lr = real("lr_warmup_init");
  o.warmup_samples = count("lr_warmup_samples"), o.decay_samples = count("lr_decay_samples");
  o.wsd_decay_samples = count("lr_wsd_decay_samples");
  o.weight_decay_samples = count("weight_decay_samples");
  o.start_weight_decay = real("start_weight_decay"), o.end_weight_decay = real("end_weight_decay");
  s.decoupled_lr = optional("decoupled_lr"), s.decoupled_min_lr = optional("decoupled_min_lr");
  s.lr_warmup_fraction = optional("lr_warmup_fraction");
  s.lr_wsd_decay_fraction = optional("lr_wsd_decay_fraction");
  if (json.contains("from_command_line")) {
    if (!json["from_command_line"].is_array()) wrong("from_command_line");
    for (const auto& field : json["from_command_line"]) {
      if (!field.is_string()) wrong("from_command_line");
      s.from_command_line.push_back(field.get<std::string>());
    }
  }
  return s;
}

std::string summary(const RunSchedule& schedule, const config::BatchRamp& ramp) {
  const int64_t batch = batch_of_lengths(schedule, ramp);
  const optim::ScheduleOptions& o = schedule.options;
  std::string text = std::string(enum_name(o.style)) + ", learning rate " + to_text(o.max_lr);
  const bool decays = o.style != config::LrDecayStyle::constant;
  if (decays) text += " to " + to_text(o.min_lr);
  if (o.warmup_samples > 0) text += ", warm-up " + steps_text(o.warmup_samples, batch);
  if (decays) text += ", decay " + steps_text(o.decay_samples, batch);
  text += ", weight decay " + to_text(o.end_weight_decay);
  return text;
}

std::string recipe_with_schedule(const std::string& recipe, const RunSchedule& followed,
                                 const config::Config& config) {
  const RunSchedule own = schedule_of(config, {});
  const optim::ScheduleOptions &before = own.options, &now = followed.options;
  const bool wsd = now.style == config::LrDecayStyle::wsd,
             constant = now.style == config::LrDecayStyle::constant;
  const bool in_samples = config.train.train_samples.has_value();
  const int64_t unit = in_samples ? 1 : config::full_batch_size(config);
  // No field of a recipe expresses such lengths.
  if (now.decay_samples % unit != 0 || now.warmup_samples % unit != 0 || now.wsd_decay_samples % unit != 0)
    return recipe;
  std::string text = recipe;
  write_curves(text, own, followed);
  // A constant rate has no decay length to write; fractions are those of what the recipe derives.
  const int64_t decay = (constant ? before.decay_samples : now.decay_samples) / unit;
  const auto write = [&](const std::string& length, const std::string& fraction_field,
                         const std::optional<double>& fraction, int64_t old_value, int64_t value) {
    const int64_t units = value / unit;
    const double by_fraction = fraction.value_or(0) * static_cast<double>(decay);
    const bool agrees = !fraction || std::abs(by_fraction - static_cast<double>(units)) <= 0.5;
    if (old_value != value || !agrees)
      write_field(text, "scheduler." + length + (in_samples ? "_samples" : "_iters"), std::to_string(units));
    if (!agrees) write_field(text, "scheduler." + fraction_field, "null");
  };
  const config::SchedulerConfig& s = config.scheduler;
  if (!constant) write("lr_decay", "", std::nullopt, before.decay_samples, now.decay_samples);
  write("lr_warmup", "lr_warmup_fraction", s.lr_warmup_fraction, before.warmup_samples, now.warmup_samples);
  if (wsd) {
    write("lr_wsd_decay", "lr_wsd_decay_fraction", s.lr_wsd_decay_fraction, before.wsd_decay_samples,
          now.wsd_decay_samples);
  } else if (before.style == config::LrDecayStyle::wsd) {
    for (const char* field : {"lr_wsd_decay_iters", "lr_wsd_decay_samples", "lr_wsd_decay_fraction"})
      write_field(text, std::string("scheduler.") + field, "null");
  }
  // The recipe stays as it was if the changed text does not resolve: a checkpoint needs a recipe that does.
  // The schedule is stored beside it as well.
  config::Request recorded;
  recorded.recipe = "recipe.yaml";
  return text == recipe || config::resolve_text(text, recorded).ok() ? text : recipe;
}

ScheduleChoice choose_schedule(const RunSchedule& stored, const RunSchedule& now, const RecipeRecord& record,
                               const config::Config& config) {
  const config::BatchRamp ramp(config);
  const int64_t batch = constant_batch(ramp),
                shown = std::min(batch_of_lengths(stored, ramp), batch_of_lengths(now, ramp));
  const config::SchedulerConfig& s = config.scheduler;
  ScheduleChoice choice;
  choice.schedule = s.override_opt_param_scheduler ? now : stored;
  std::vector<std::string>& remembered = choice.schedule.from_command_line;
  // A value in a recipe file does not override the checkpoint's value if the command line of an earlier start
  // set that, even if this start's command line does not repeat it.
  const auto is_explicit = [&](std::string_view field) {
    return holds(record.from_command_line, field) ||
           (holds(record.from_files, field) && !holds(stored.from_command_line, field));
  };
  // min_lr follows lr where the ratio is the same.
  const auto ratio_of = [](const RunSchedule& schedule) {
    return schedule.options.max_lr > 0 ? schedule.options.min_lr / schedule.options.max_lr : 0.0;
  };
  const bool other_ratio = std::abs(ratio_of(stored) - ratio_of(now)) > 1e-9;
  const auto fraction_of = [](const RunSchedule& schedule, const ScheduleValue& value) {
    return value.fraction_field == "scheduler.lr_warmup_fraction" ? schedule.lr_warmup_fraction
                                                                  : schedule.lr_wsd_decay_fraction;
  };
  for (const ScheduleValue& value : kValues) {
    if (is_idle(value, stored) && is_idle(value, now)) continue;
    const std::string before = value.text(stored, shown), after = value.text(now, shown);
    if (before == after) continue;
    const std::string name(value.name(config.train.train_samples || config.train.epochs));
    if (s.override_opt_param_scheduler) {
      choice.fields_taken.push_back(name + ": " + before + " -> " + after);
      continue;
    }
    const auto cause = std::find_if(value.fields.begin(), value.fields.end(), [&](std::string_view field) {
      return is_explicit(field) && (field != "optimizer.min_lr_ratio" || other_ratio);
    });
    const bool by_fraction = !value.fraction_field.empty() && is_explicit(value.fraction_field) &&
                             fraction_of(stored, value) != fraction_of(now, value);
    if (s.use_checkpoint_opt_param_scheduler || (cause == value.fields.end() && !by_fraction)) {
      const bool overruled = cause != value.fields.end() || by_fraction;
      choice.fields_kept.push_back(name + ": the checkpoint's " + before + ", not " + after +
                                   (overruled ? " (scheduler.use_checkpoint_opt_param_scheduler)" : ""));
      choice.keeps_decay_length |= is_decay_length(value);
      continue;
    }
    if (cause != value.fields.end() && cause->starts_with("optimizer.")) {
      const std::string by = *cause == name ? "" : " (by `" + std::string(*cause) + "`)";
      const std::string text = name + by + ": " + before + " -> " + after;
      if (!holds(choice.refused, text)) choice.refused.push_back(text);
      continue;
    }
    value.copy(now, choice.schedule);
    // The field is a fraction of the decay length in force.
    if (cause == value.fields.end()) {
      const int64_t decay = choice.schedule.options.decay_samples,
                    unit = batch > 0 && decay % batch == 0 ? batch : 1, units = decay / unit;
      const int64_t length = std::llround(*fraction_of(now, value) * static_cast<double>(units)) * unit;
      (value.fraction_field == "scheduler.lr_warmup_fraction" ? choice.schedule.options.warmup_samples
                                                              : choice.schedule.options.wsd_decay_samples) =
          length;
    }
    choice.fields_taken.push_back(std::string(cause == value.fields.end() ? value.fraction_field : *cause) +
                                  ": " + before + " -> " + value.text(choice.schedule, shown));
    std::erase_if(remembered, [&](const std::string& field) {
      return std::find(value.fields.begin(), value.fields.end(), field) != value.fields.end();
    });
  }
  if (s.use_checkpoint_opt_param_scheduler) return choice;
  for (const std::string& field : now.from_command_line)
    if (!holds(remembered, field)) remembered.push_back(field);
  return choice;
}

}  // namespace capstan::train
