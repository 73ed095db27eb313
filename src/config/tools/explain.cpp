// `capstan explain`: a field, a section, a rule or a diagnostic code in words.
#include <algorithm>
#include <map>

#include "base/error.hpp"
#include "base/json.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"
#include "config/core/convert.hpp"
#include "config/core/emit.hpp"
#include "config/tools/show.hpp"

namespace capstan::config {

const std::vector<CodeInfo>& diagnostic_codes() {
  static const std::vector<CodeInfo> codes{
      {"C0001", "a file that the recipe or the command line names cannot be read"},
      {"C0002", "the text is not YAML"},
      {"C0003", "a tab is used for indentation"},
      {"C0004", "the file is not UTF-8 text, or holds control characters"},
      {"C0005", "a key is written twice in one mapping"},
      {"C0006", "merge keys (`<<`) are not accepted; use `extends` and presets"},
      {"C0007", "YAML tags are not accepted; values take their type from the field"},
      {"C0008", "an alias is unknown, contains itself, or expands too far"},
      {"C0009", "nested too deep, too many values, or a line that is too long"},
      {"C0010", "more than one document, or text after the end of it"},
      {"C0011", "the recipe is empty"},
      {"C0012", "a key is not plain text"},
      {"C0013", "the top of a recipe is not a mapping"},
      {"C0101", "a path does not start with a section"},
      {"C0102", "a key that no field has"},
      {"C0103", "an override that the grammar does not know"},
      {"C0104", "one field is given twice in one file"},
      {"C0105", "two spellings of one field have different values in one layer"},
      {"C0106", "`+path=value` where the field already has an explicit value"},
      {"C0107", "`~path=value` where the field has another value"},
      {"C0108", "a path reaches into a value that has no such item"},
      {"C0109", "a field of a section that is switched off"},
      {"C0110", "a field that the section's kind does not have"},
      {"C0111", "two fields that give one value disagree"},
      {"C0201", "a text that is not a value of the field's type"},
      {"C0202", "a value outside the field's range"},
      {"C0203", "a key without a value"},
      {"C0204", "a number or boolean in quotes"},
      {"C0205", "null for a field that is not optional"},
      {"C0206", "a list or mapping where a single value belongs, or the other way round"},
      {"C0207", "a name that is not one of the field's choices"},
      {"C0208", "a secret written out"},
      {"C0210", "a required field is missing"},
      {"C0401", "`${…}` that is malformed or unknown"},
      {"C0402", "`${…}` names no field"},
      {"C0403", "fields that are defined by each other"},
      {"C0404", "an environment variable that is not set"},
      {"C0405", "`${…}` where its value is not allowed"},
      {"C0501", "`extends` names no recipe, or a file extends itself"},
      {"C0502", "too many files"},
      {"C0503", "a recipe names a file outside its own directory"},
      {"C0504", "a recipe format that this version does not read"},
      {"C0505", "a preset that does not exist or sets what it may not"},
      {"C0506", "two presets set one field differently"},
      {"C0507", "a recipe for many models, and none is chosen"},
      {"C0601", "none_as_text: the text `None` where null may have been meant"},
      {"C0602", "deprecated_key: an old name or a deprecated field"},
      {"C0603",
       "unused_override: an override without effect, because a later one replaces it or there is nothing to "
       "reset"},
      {"C0604",
       "no_effect: an explicit value that would change results, but is not used in this configuration"},
      {"C0605", "interpolated_key: `${…}` in the key of an open mapping, where it is plain text"},
      {"C0606",
       "unused_value: an explicit value that another choice of the recipe makes idle; the numbers are as "
       "they would be without it"},
      {"C0701", "a value of a recipe of your own is dropped because its section is off or of another kind"},
      {"C0702", "a preset's value is hidden by an explicit one"},
      {"C0801", "missing_file: a file that the recipe names and that is not there"},
      {"C0802", "unusable_file: a file that the recipe names, that is there, and that training cannot use"},
      {"C0803", "unwritable_directory: a directory that the run writes, and that cannot be made or written"},
      {"C0804", "occupied_directory: a directory that the run would write, and that holds other files"},
      {"C0805", "device_not_here: a device of the recipe that this machine does not have"},
      {"C0806", "start_warning: a warning about data or weights with which `train` would begin"},
  };
  return codes;
}

namespace {

struct Topic {
  const FieldInfo* field = nullptr;
  const SectionInfo* section = nullptr;
  const Rule* rule = nullptr;
  const CodeInfo* code = nullptr;
  // The fields that a name that is no path may mean.
  std::vector<const FieldInfo*> fields;
  // Why these fields were chosen.
  std::string note;
};

// Search words that are neither fields nor their names in other programs.
struct Term {
  std::string_view name, note;
  // The second may be null.
  const char* fields[2];
};
const Term kTerms[] = {
    {"fsdp",
     "fully sharded data parallelism: ddp.data_parallel_sharding_strategy=optim_grads_params",
     {"ddp.data_parallel_sharding_strategy", "ddp.num_distributed_optimizer_instances"}},
    {"hsdp",
     "sharded within groups of ranks, replicated across them",
     {"ddp.num_distributed_optimizer_instances", "ddp.data_parallel_sharding_strategy"}},
    {"zero", "parts of data parallelism's state that are sharded", {"ddp.data_parallel_sharding_strategy"}},
    {"tensor_parallelism", "", {"dist.tensor_model_parallel_size", "dist.sequence_parallel"}},
    {"pipeline_parallelism",
     "",
     {"dist.pipeline_model_parallel_size", "dist.virtual_pipeline_model_parallel_size"}},
    {"data_parallelism", "", {"dist.data_parallel_size", "ddp.data_parallel_sharding_strategy"}},
    {"batch_size",
     "samples of one forward pass on a rank, and of one step over all ranks",
     {"train.micro_batch_size", "train.global_batch_size"}},
    {"uneven_batches",
     "a batch that micro-batches and ranks do not divide: capstan help choosing-a-layout",
     {"train.decrease_batch_size_if_needed", "train.global_batch_size"}},
    {"gradient_accumulation_steps",
     "derived: global_batch_size / (micro_batch_size * data_parallel_size)",
     {"train.num_microbatches", "train.global_batch_size"}},
    {"warmup", "", {"scheduler.lr_warmup_fraction", "scheduler.lr_warmup_iters"}},
    {"mixed_precision_dtype", "", {"mixed_precision.params_dtype"}},
    {"activation_checkpointing", "", {"model.recompute_granularity"}},
    {"gradient_checkpointing", "", {"model.recompute_granularity"}},
    {"lora_rank", "", {"peft.dim"}},
    {"lora_r", "", {"peft.dim"}},
    {"lora_target_modules", "", {"peft.target_modules"}},
};

// Fields with this last part of their path, or an alias or a name in another tool that is this word.
void find_by_name(const Schema& schema, std::string_view what, Topic& topic) {
  std::string name = lower_case(what);
  for (const char separator : {'-', ' '}) std::replace(name.begin(), name.end(), separator, '_');
  const auto is = [&](const std::string& spelling) {
    return spelling == name || spelling.ends_with("." + name);
  };
  for (const FieldInfo* field : schema.fields()) {
    const bool known =
        field->name == name || std::any_of(field->aliases.begin(), field->aliases.end(), is) ||
        std::any_of(field->old_names.begin(), field->old_names.end(), is) ||
        std::find(field->known_as.begin(), field->known_as.end(), name) != field->known_as.end();
    if (known) topic.fields.push_back(field);
  }
  for (const Term& one : kTerms) {
    if (one.name != name) continue;
    topic.note = one.note;
    for (const char* path : one.fields)
      if (const FieldInfo* field = path ? schema.find_field(path) : nullptr;
          field && std::find(topic.fields.begin(), topic.fields.end(), field) == topic.fields.end())
        topic.fields.push_back(field);
  }
  // A kind of sharding, of precision …: the fields of which it is a value.
  if (!topic.fields.empty()) return;
  for (const FieldInfo* field : schema.fields())
    if (field->type->kind == Type::Kind::enumeration && field->type->names->find(name)) {
      topic.fields.push_back(field);
      topic.note = "a value of " + std::string(topic.fields.size() == 1 ? "this field" : "these fields");
    }
}

// "did you mean …?" of sections, fields by their name, rules and codes; empty without a near one.
std::string near_topics(const Schema& schema, std::string_view what) {
  std::map<std::string, std::string> shown;
  for (const auto& section : schema.sections())
    if (!section.name.empty()) shown.emplace(section.name, section.name);
  for (const FieldInfo* field : schema.fields()) shown.emplace(field->name, field->path);
  for (const auto& rule : schema.rules())
    for (const auto& name : {rule.code, rule.name}) shown.emplace(name, name);
  for (const auto& code : diagnostic_codes()) shown.emplace(code.code, code.code);
  std::vector<std::string> names;
  names.reserve(shown.size());
  for (const auto& [name, text] : shown) names.push_back(name);
  std::vector<std::string> near = near_matches(what, names);
  if (near.empty()) {
    // The names of other programs, which are many.
    for (const FieldInfo* field : schema.fields())
      for (const std::string& name : field->known_as)
        if (shown.emplace(name, field->path).second) names.push_back(name);
    near = near_matches(what, names, 1);
  }
  for (std::string& name : near) name = shown.at(name);
  return near_paths_help(near);
}

Topic find_topic(const Schema& schema, std::string_view what) {
  Topic topic;
  if (what.empty()) return topic;
  for (const auto& code : diagnostic_codes())
    if (what == code.code) topic.code = &code;
  for (const auto& rule : schema.rules())
    if (what == rule.code || what == rule.name) topic.rule = &rule;
  topic.field = schema.find_spelling(what);
  topic.section = schema.find_section(what);
  if (topic.field || topic.section || topic.rule || topic.code) return topic;
  const size_t dot = what.find('.');
  const bool dotted = dot != std::string_view::npos;
  if (!dotted) find_by_name(schema, what, topic);
  if (topic.fields.size() == 1 && topic.note.empty()) topic.field = topic.fields[0];
  if (!topic.fields.empty()) return topic;
  if (const std::string near = dotted ? std::string() : near_topics(schema, what); !near.empty())
    fail(ErrorCode::usage, "there is no field, section, rule or code `" + std::string(what) + "`", near);
  const Diagnostic problem = unknown_key(schema, dotted ? std::string(what.substr(0, dot)) : "",
                                         std::string(dotted ? what.substr(dot + 1) : what), {});
  std::string help;
  for (const auto& line : problem.helps) help += (help.empty() ? "" : "; ") + line;
  fail(ErrorCode::usage, "there is no field, section, rule or code `" + std::string(what) + "`", help);
}

const char* status_text(HistoryEntry::Status status) {
  switch (status) {
    case HistoryEntry::Status::effective:
      return "";
    case HistoryEntry::Status::replaced:
      return "  (replaced)";
    case HistoryEntry::Status::reset:
      return "  (taken back)";
    case HistoryEntry::Status::dropped:
      return "  (dropped)";
  }
  return "";
}

std::vector<std::string> spellings(const FieldInfo& field, const std::vector<std::string>& names) {
  std::vector<std::string> out;
  out.reserve(names.size());
  for (const auto& name : names)
    out.push_back(name.find('.') != std::string::npos || field.section.empty() ? name
                                                                               : field.section + "." + name);
  return out;
}

// The derivations and rules that read a field.
std::vector<std::string> dependants(const Schema& schema, const FieldInfo& field) {
  std::vector<std::string> out;
  for (const auto& derivation : schema.derivations())
    if (std::find(derivation.inputs.begin(), derivation.inputs.end(), field.path) != derivation.inputs.end())
      out.push_back(derivation.path + " = " + derivation.formula);
  return out;
}

std::string explain_field(const Schema& schema, const FieldInfo& field, const void* root,
                          const Resolved* resolved) {
  std::string out = field.path + "\n  " + field.doc + "\n\n";
  const auto row = [&](std::string_view name, const std::string& text) {
    if (text.empty()) return;
    out += "  " + std::string(name) + std::string(name.size() < 10 ? 10 - name.size() : 1, ' ') + text + "\n";
  };
  row("type", type_text(*field.type, field) + (field.type->optional ? ", or null" : "") +
                  (field.scalar_ok ? "; a single item needs no brackets" : ""));
  row("default", field.required ? "none: must be given" : yaml_inline(*field.type, field.default_value));
  row("derived", field.formula);
  row("instead of", field.instead_of);
  row("unit", field.unit);
  row("effect", std::string(effect_text(field.effect)));
  row("since", field.since);
  for (const auto& condition : field.used_when) row("read when", condition.text);
  for (const auto& condition : schema.sections()[field.section_index].used_when)
    row("read when", condition.text);
  row("only for", join(field.variants, ", "));
  row("aliases", join(spellings(field, field.aliases), ", "));
  row("was", join(spellings(field, field.old_names), ", "));
  row("elsewhere", join(field.known_as, ", "));
  row("deprecated", field.deprecated);
  row("example", join(field.examples, ", "));
  for (const auto& missing : field.unsupported) row("train", "refuses some values: " + missing.reason);
  const Type* type = field.type->kind == Type::Kind::list ? field.type->element : field.type;
  if (type->kind == Type::Kind::enumeration) {
    out += "\n  values\n";
    for (const auto& entry : type->names->entries) {
      std::string line = "    " + std::string(entry.name);
      if (!entry.doc.empty())
        line += (line.size() < 20 ? std::string(20 - line.size(), ' ') : "  ") + std::string(entry.doc);
      if (!entry.aliases.empty()) line += "  (also " + join(entry.aliases, ", ") + ")";
      out += line + "\n";
    }
  }
  if (type->kind == Type::Kind::record) {
    out += "\n  fields of an item\n";
    for (const auto& inner : type->record->fields)
      out += "    " + inner.name + ": " + inner.doc + " (" + type_text(*inner.type, inner) + ")\n";
  }
  const auto dependent = dependants(schema, field);
  if (!dependent.empty()) out += "\n  derived from it\n";
  for (const auto& line : dependent) out += "    " + line + "\n";
  bool first = true;
  for (const auto& rule : schema.rules()) {
    if (std::find(rule.reads.begin(), rule.reads.end(), field.path) == rule.reads.end()) continue;
    if (first) out += "\n  rules that read it\n";
    first = false;
    out += "    " + rule.code + " " + rule.name + ": " + rule.doc + "\n";
  }
  if (!resolved || !root) return out;
  out += "\n  in " + resolved->recipe_name + "\n";
  if (!schema.sections()[field.section_index].at(root)) return out + "    the section is switched off\n";
  out += "    " + yaml_inline(*field.type, schema.load(root, field)) + "  (" +
         resolved->origin(field.path).text + ")\n";
  std::string writes;
  for (const auto& entry : resolved->history)
    if (entry.path == field.path)
      writes += "    " + entry.origin.text +
                (entry.origin.written.empty() ? "" : ": " + entry.origin.written) +
                status_text(entry.status) + "\n";
  if (!writes.empty())
    out += "\n  writes, weakest first\n    default: " + yaml_inline(*field.type, field.default_value) + "\n" +
           writes;
  return out;
}

std::string explain_section(const SectionInfo& section) {
  std::string out =
      section.name + "\n  " + section.doc + (section.optional ? " (may be switched off: null)" : "") + "\n\n";
  size_t width = 0;
  for (const auto& field : section.fields) width = std::max(width, field.name.size());
  for (const auto& field : section.fields)
    out += "  " + field.name + std::string(width - field.name.size() + 2, ' ') + field.doc + "\n";
  return out;
}

std::string_view status_name(HistoryEntry::Status status) {
  switch (status) {
    case HistoryEntry::Status::effective:
      return "effective";
    case HistoryEntry::Status::replaced:
      return "replaced";
    case HistoryEntry::Status::reset:
      return "reset";
    case HistoryEntry::Status::dropped:
      return "dropped";
  }
  return "";
}

// Adds the description of a field to an object.
void add_field(OrderedJson& out, const Schema& schema, const FieldInfo& field, const void* root,
               const Resolved* resolved) {
  out["path"] = field.path;
  out["doc"] = field.doc;
  out["type"] = type_text(*field.type, field);
  out["optional"] = field.type->optional;
  out["required"] = field.required;
  out["default"] = ordered_json_of(json(*field.type, field.default_value));
  out["effect"] = enum_name(field.effect);
  out["since"] = field.since;
  if (!field.unit.empty()) out["unit"] = field.unit;
  if (!field.formula.empty()) out["derived"] = field.formula;
  out["aliases"] = spellings(field, field.aliases);
  const Type* type = field.type->kind == Type::Kind::list ? field.type->element : field.type;
  if (type->kind == Type::Kind::enumeration)
    for (const auto& entry : type->names->entries)
      out["values"].push_back({{"name", entry.name}, {"doc", entry.doc}});
  OrderedJson& rules = out["rules"] = OrderedJson::array();
  for (const auto& rule : schema.rules())
    if (std::find(rule.reads.begin(), rule.reads.end(), field.path) != rule.reads.end())
      rules.push_back({{"code", rule.code}, {"name", rule.name}, {"doc", rule.doc}});
  if (!root || !resolved || !schema.sections()[field.section_index].at(root)) return;
  out["value"] = ordered_json_of(json(*field.type, schema.load(root, field)));
  out["origin"] = resolved->origin(field.path).text;
  OrderedJson& writes = out["writes"] = OrderedJson::array();
  for (const auto& entry : resolved->history)
    if (entry.path == field.path)
      writes.push_back({{"origin", entry.origin.text},
                        {"written", entry.origin.written},
                        {"status", status_name(entry.status)}});
}

}  // namespace

std::string explain(const Schema& schema, std::string_view what, const void* root, const Resolved* resolved) {
  const Topic topic = find_topic(schema, what);
  if (topic.field) return explain_field(schema, *topic.field, root, resolved);
  if (!topic.fields.empty()) {
    std::string out;
    const std::string note = topic.note.empty() ? std::string() : ": " + topic.note;
    if (topic.fields.size() > 1 || !note.empty())
      out = "`" + std::string(what) + "`" + (note.empty() ? " is a name of several fields" : note) + "\n\n";
    for (size_t i = 0; i < topic.fields.size(); ++i)
      out += (i ? "\n" : "") + explain_field(schema, *topic.fields[i], root, resolved);
    return out;
  }
  if (topic.section) return explain_section(*topic.section);
  if (topic.rule)
    return topic.rule->code + " " + topic.rule->name + "\n  " + topic.rule->doc + "\n\n  reads " +
           join(topic.rule->reads, ", ") + "\n";
  if (topic.code) return std::string(topic.code->code) + "\n  " + topic.code->title + "\n";
  std::string out;
  for (const auto& section : schema.sections())
    if (!section.name.empty())
      out += section.name + std::string(section.name.size() < 18 ? 18 - section.name.size() : 1, ' ') +
             section.doc + "\n";
  return out;
}
std::string explain(std::string_view what, const Resolution* resolution) {
  return explain(schema(), what, resolution ? &resolution->config : nullptr, resolution);
}

std::string explain_json(const Schema& schema, std::string_view what, const void* root,
                         const Resolved* resolved) {
  const Topic topic = find_topic(schema, what);
  OrderedJson out = {{"schema", "capstan.explain/1"}};
  const auto field_json = [&](const FieldInfo& field) {
    OrderedJson object;
    add_field(object, schema, field, root, resolved);
    return object;
  };
  if (topic.field) {
    add_field(out, schema, *topic.field, root, resolved);
  } else if (!topic.fields.empty()) {
    out["name"] = what;
    out["note"] = topic.note;
    for (const FieldInfo* field : topic.fields) out["fields"].push_back(field_json(*field));
  } else if (topic.rule) {
    out["code"] = topic.rule->code;
    out["name"] = topic.rule->name;
    out["doc"] = topic.rule->doc;
    out["reads"] = topic.rule->reads;
  } else if (topic.code) {
    out["code"] = topic.code->code;
    out["doc"] = topic.code->title;
  } else {
    OrderedJson& sections = out["sections"] = OrderedJson::array();
    for (const auto& section : schema.sections()) {
      if (topic.section ? &section != topic.section : section.name.empty()) continue;
      OrderedJson fields = OrderedJson::array();
      for (const auto& field : section.fields)
        fields.push_back(topic.section ? field_json(field) : OrderedJson(field.name));
      sections.push_back({{"name", section.name},
                          {"doc", section.doc},
                          {"optional", section.optional},
                          {"fields", std::move(fields)}});
    }
  }
  return dump_json(out) + "\n";
}

}  // namespace capstan::config
