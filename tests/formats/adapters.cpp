// Adapters that PEFT saved (make_adapters.py): the same update of the weights, joined and split again.
#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/json.hpp"
#include "config/sections/adapter_targets.hpp"
#include "formats/family.hpp"
#include "formats/hf_config.hpp"
#include "formats/hf_directory.hpp"
#include "formats/peft_mapping.hpp"
#include "tests/formats/helpers.hpp"
#include "tests/support/errors.hpp"
#include "tests/support/fixture.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace capstan;
using namespace capstan::formats;
using test::error_of;
using test::floats;
using test::holds;
using test::kFormatFixtures;
namespace fs = std::filesystem;

namespace {

struct Base {
  HfDirectory files;
  HfModel model;
  ArrangementTable table;
  explicit Base(const std::string& name)
      : files(kFormatFixtures / "families" / name),
        model(read_hf_config(files.read_text(kConfigFile), "config.json")),
        table(parameter_table(model.model, model.family->names)) {}
  AdapterSet set(const PeftAdapter& adapter) const {
    return to_capstan(adapter, model.model, model.family->names, {}, "the adapter");
  }
};

// W + s B A, with each row scaled to its magnitude; rows are outputs.
std::vector<float> merged(std::vector<float> weight, const AdapterModule& m) {
  for (int64_t o = 0; o < m.out; ++o) {
    double length = 0;
    for (int64_t i = 0; i < m.in; ++i) {
      double delta = 0;
      for (int64_t r = 0; r < m.rank; ++r)
        delta += static_cast<double>(m.b[static_cast<size_t>(o * m.rank + r)]) *
                 m.a[static_cast<size_t>(r * m.in + i)];
      float& w = weight[static_cast<size_t>(o * m.in + i)];
      w = static_cast<float>(w + m.scale * delta);
      length += static_cast<double>(w) * w;
    }
    if (m.magnitude.empty()) continue;
    for (int64_t i = 0; i < m.in; ++i)
      weight[static_cast<size_t>(o * m.in + i)] *=
          static_cast<float>(m.magnitude[static_cast<size_t>(o)] / std::sqrt(length));
  }
  return weight;
}

}  // namespace

TEST_CASE("an adapter's update is PEFT's, in the file's modules and in Capstan's") {
  for (const auto& [name, base_name, parts] : {std::tuple{"lora", "llama", true},
                                               {"rslora", "llama", true},
                                               {"rslora_all", "llama", true},
                                               {"patterns", "llama", true},
                                               {"dora", "llama", true},
                                               {"dora_part", "llama", true},
                                               {"phi3", "phi3", false},
                                               {"gpt_neox", "gpt_neox", false},
                                               {"mixtral", "mixtral", true},
                                               {"gpt2", "gpt2", false}}) {
    CAPTURE(name);
    Base base(base_name);
    const bool transposed = base.model.family->names.transposed;
    const PeftAdapter adapter = read_peft(kFormatFixtures / "adapters" / name);
    CHECK(adapter.config.fan_in_fan_out == transposed);
    const test::Fixture truth((kFormatFixtures / "adapters" / name / "merged.safetensors").string());
    // The file's tensors, [out, in].
    std::map<std::string, std::vector<float>> after;
    for (const AdapterModule& module : adapter.modules) {
      CAPTURE(module.module);
      std::vector<float> weight = floats(base.files, module.module + ".weight"),
                         expected = truth.get<float>(module.module + ".weight");
      const auto transpose = [&](std::vector<float>& values) {
        std::vector<float> result(values.size());
        for (int64_t i = 0; i < module.in; ++i)
          for (int64_t o = 0; o < module.out; ++o)
            result[static_cast<size_t>(o * module.in + i)] = values[static_cast<size_t>(i * module.out + o)];
        values = result;
      };
      if (transposed) transpose(weight), transpose(expected);
      const auto got = merged(weight, module);
      for (size_t i = 0; i < got.size(); ++i) REQUIRE(std::abs(got[i] - expected[i]) < 2e-6);
      after[module.module] = got;
    }
    const AdapterSet set = base.set(adapter);
    CHECK(config::adapts_parts(set.peft.scheme) == parts);
    CHECK(config::has_magnitudes(set.peft.scheme) == adapter.config.dora);
    // Converting back gives the same files, except where ranks were padded.
    const bool one_rank = name != std::string("rslora") && name != std::string("patterns");
    const PeftAdapter back = to_peft(set, base.model.model, base.model.family->names, base_name);
    REQUIRE(back.modules.size() == adapter.modules.size());
    for (size_t i = 0; i < back.modules.size(); ++i) {
      const AdapterModule &a = adapter.modules[i], &b = back.modules[i];
      CAPTURE(a.module);
      CHECK(a.module == b.module);
      CHECK(a.magnitude == b.magnitude);
      if (one_rank) CHECK((a.rank == b.rank && a.scale == b.scale && a.a == b.a && a.b == b.b));
      std::vector<float> weight = floats(base.files, a.module + ".weight");
      if (transposed) continue;  // compared as numbers above
      const auto got = merged(weight, b);
      for (size_t k = 0; k < got.size(); ++k) REQUIRE(std::abs(got[k] - after[a.module][k]) < 2e-6);
    }
    if (one_rank) {
      test::TemporaryDirectory home;
      write_peft(home.path() / "there", back);
      CHECK(read_file(home.path() / "there/adapter_model.safetensors").size() ==
            read_file(kFormatFixtures / "adapters" / name / "adapter_model.safetensors").size());
      CHECK(read_peft(home.path() / "there").config.target_modules == adapter.config.target_modules);
    }
  }
}

namespace {

AdapterModule made_module(const std::string& path, int64_t out, int64_t in, int64_t rank, double scale,
                          bool magnitude, float step) {
  AdapterModule m;
  m.module = path;
  m.rank = rank;
  m.scale = scale;
  m.out = out;
  m.in = in;
  for (int64_t i = 0; i < m.rank * m.in; ++i) m.a.push_back(step * static_cast<float>(i % 17 - 5));
  for (int64_t i = 0; i < m.out * m.rank; ++i) m.b.push_back(2 * step * static_cast<float>(i % 13 - 6));
  for (int64_t i = 0; magnitude && i < m.out; ++i) m.magnitude.push_back(1 + step * static_cast<float>(i));
  return m;
}

}  // namespace

TEST_CASE("a fused adapter is split and joined without loss, and its files read back") {
  Base base("llama");
  AdapterSet fused;
  fused.peft.scheme = config::PeftScheme::dora;
  fused.peft.target_modules.clear();
  fused.peft.dim = 3;
  fused.peft.alpha = 6;
  for (const char* name : {"decoder.layers.0.self_attention.linear_qkv", "decoder.layers.1.mlp.linear_fc1"}) {
    const auto& shape = base.table.targets.at(std::string(name) + ".weight").shape;
    fused.modules.push_back(made_module(name, shape[0], shape[1], 3, 2, true, 0.01f));
    fused.peft.target_modules.emplace_back(name);
  }
  const PeftAdapter split = to_peft(fused, base.model.model, base.model.family->names, "somebody/llama");
  CHECK(split.modules.size() == 5);
  CHECK(split.config.dora);
  CHECK(split.config.target_modules.size() == 5);  // of one layer alone: full names
  test::TemporaryDirectory home;
  write_peft(home.path() / "adapter", split);
  const PeftAdapter read = read_peft(home.path() / "adapter");
  CHECK(read.config.base_model == "somebody/llama");
  const AdapterSet joined = base.set(read);
  CHECK(joined.peft.scheme == config::PeftScheme::dora);
  CHECK(joined.peft.target_modules == fused.peft.target_modules);
  REQUIRE(joined.modules.size() == fused.modules.size());
  for (size_t i = 0; i < joined.modules.size(); ++i) {
    const AdapterModule &got = joined.modules[i], &expected = fused.modules[i];
    CHECK(got.module == expected.module);
    CHECK(got.rank == expected.rank);
    CHECK(got.scale == expected.scale);
    CHECK(got.a == expected.a);
    CHECK(got.b == expected.b);
    CHECK(got.magnitude == expected.magnitude);
  }
  // Writing again gives the same bytes.
  write_peft(home.path() / "again",
             to_peft(joined, base.model.model, base.model.family->names, read.config.base_model));
  for (const char* file : {"adapter_config.json", "adapter_model.safetensors"})
    CHECK(read_file(home.path() / "adapter" / file) == read_file(home.path() / "again" / file));
}

TEST_CASE("adapters of parts beside modules that are fused in the file: stacked, with the same update") {
  Base base("phi3");
  const config::ModelConfig& m = base.model.model;
  for (const bool dora : {false, true}) {
    AdapterSet parts;
    parts.peft.scheme = dora ? config::PeftScheme::canonical_dora : config::PeftScheme::canonical_lora;
    parts.peft.dim = 2;
    parts.peft.alpha = 3;
    parts.peft.use_rslora = true;
    parts.peft.target_modules = {"linear_q", "linear_k", "linear_v"};
    float step = 0.01f;
    const std::string around = "decoder.layers.1.self_attention.";
    const int64_t rows = base.table.targets.at(around + "linear_qkv.weight").shape[0];
    for (const auto& part : config::layer_slices(m, around + "linear_qkv", rows))
      parts.modules.push_back(made_module(part.path, part.groups * part.count, m.hidden_size, 2,
                                          config::adapter_scale(parts.peft), dora, step += 0.01f));
    const PeftAdapter made = to_peft(parts, m, base.model.family->names, "");
    REQUIRE(made.modules.size() == 1);
    CHECK(made.modules[0].rank == 6);
    CHECK(made.config.scale_of(made.modules[0].module, 6) == doctest::Approx(parts.modules[0].scale));
    const auto got = merged(floats(base.files, "model.layers.1.self_attn.qkv_proj.weight"), made.modules[0]);
    RearrangedSource before(base.files, base.table);
    const std::string fused = around + "linear_qkv";
    const auto weight = floats(before, fused + ".weight");
    size_t index = 0;
    for (const auto& part : config::layer_slices(m, fused, rows)) {
      const AdapterModule& own = parts.modules[index++];
      const int64_t width = rows / part.groups, columns = m.hidden_size;
      std::vector<float> of_part;
      for (int64_t g = 0; g < part.groups; ++g)
        of_part.insert(of_part.end(), weight.begin() + (g * width + part.begin) * columns,
                       weight.begin() + (g * width + part.begin + part.count) * columns);
      const auto expected = merged(of_part, own);
      for (const Segment& segment : base.table.targets.at(fused + ".weight").segments)
        for (int64_t row = 0; row < segment.count; ++row) {
          const int64_t in_group = (segment.begin + row) % width - part.begin;
          if (in_group < 0 || in_group >= part.count) continue;
          const int64_t ours = (segment.begin + row) / width * part.count + in_group;
          for (int64_t i = 0; i < columns; ++i)
            REQUIRE(std::abs(got[static_cast<size_t>((segment.source_begin + row) * columns + i)] -
                             expected[static_cast<size_t>(ours * columns + i)]) < 2e-6);
        }
    }
    // PEFT cannot express magnitudes of a single slice, but it can express LoRA of a slice.
    parts.modules.pop_back();
    if (dora)
      CHECK(holds(error_of([&] { to_peft(parts, m, base.model.family->names, ""); }), "for a part of"));
    else
      CHECK(to_peft(parts, m, base.model.family->names, "").modules[0].rank == 4);
  }
}

TEST_CASE(
    "where the file has all experts in one tensor, adapters of attention pass and those of experts not") {
  Base base("gpt_oss");
  const config::ModelConfig& m = base.model.model;
  AdapterSet ours;
  ours.peft.scheme = config::PeftScheme::canonical_lora;
  ours.peft.dim = 3;
  ours.peft.alpha = 6;
  const std::string layer = "decoder.layers.2.";
  ours.modules = {made_module(layer + "self_attention.linear_k", 12, 24, 3, 2, false, 0.02f),
                  made_module(layer + "self_attention.linear_proj", 24, 24, 3, 2, false, 0.03f)};
  const PeftAdapter theirs = to_peft(ours, m, base.model.family->names, "somebody/gpt-oss");
  REQUIRE(theirs.modules.size() == 2);
  const AdapterSet back = base.set(theirs);
  REQUIRE(back.modules.size() == 2);
  for (const AdapterModule& module : back.modules) {
    const AdapterModule& own = ours.modules[module.module == ours.modules[0].module ? 0 : 1];
    CHECK(module.module == own.module);
    CHECK((module.a == own.a && module.b == own.b));
  }
  ours.modules.push_back(made_module(layer + "mlp.experts.linear_fc2", 24, 14, 3, 2, false, 0.04f));
  const std::string error = error_of([&] { to_peft(ours, m, base.model.family->names, ""); });
  CHECK_MESSAGE(holds(error, "`decoder.layers.2.mlp.experts.linear_fc2` is in one tensor of all experts"),
                error);
}

TEST_CASE("adapters of experts: a module for each expert in the file, one tensor of all of them in Capstan") {
  Base base("mixtral");
  const config::ModelConfig& m = base.model.model;
  const std::string path = "decoder.layers.1.mlp.experts.";
  for (const bool parts : {false, true}) {
    CAPTURE(parts);
    AdapterSet ours;
    ours.peft.scheme = parts ? config::PeftScheme::canonical_lora : config::PeftScheme::lora;
    ours.peft.dim = 3;
    ours.peft.alpha = 6;
    ours.peft.target_modules = {};
    const std::vector<std::string> names = parts ? std::vector<std::string>{"linear_fc1_gate", "linear_fc2"}
                                                 : std::vector<std::string>{"linear_fc1", "linear_fc2"};
    float step = 0.01f;
    for (const std::string& name : names) {
      const bool fc2 = name == "linear_fc2";
      const int64_t out = fc2 ? 24 : parts ? 14 : 28, in = fc2 ? 14 : 24;
      for (int64_t expert = 0; expert < 5; ++expert) {
        ours.modules.push_back(made_module(path + name, out, in, 3, 2, false, step += 0.01f));
        ours.modules.back().expert = expert, ours.modules.back().experts = 5;
      }
      ours.peft.target_modules.push_back(path + name);
    }
    const PeftAdapter theirs = to_peft(ours, m, base.model.family->names, "somebody/mixtral");
    REQUIRE(theirs.modules.size() == (parts ? 10 : 15));
    // The update of each matrix of the file is that of its rows here.
    for (const AdapterModule& module : theirs.modules) {
      CAPTURE(module.module);
      const std::string prefix = "model.layers.1.block_sparse_moe.experts.";
      REQUIRE(module.module.starts_with(prefix));
      const auto expert = static_cast<size_t>(module.module[prefix.size()] - '0');
      const std::string last = module.module.substr(module.module.rfind('.') + 1);
      const AdapterModule& own = ours.modules[(last == "w2" ? 5 : 0) + expert];
      CHECK(module.a == own.a);
      const int64_t first = last == "w3" ? 14 : 0;
      CHECK(module.b ==
            std::vector<float>(own.b.begin() + first * 3, own.b.begin() + (first + module.out) * 3));
    }
    test::TemporaryDirectory home;
    write_peft(home.path() / "adapter", theirs);
    const PeftAdapter read = read_peft(home.path() / "adapter");
    const AdapterSet back = base.set(read);
    CHECK(config::adapts_parts(back.peft.scheme) == parts);
    CHECK(back.peft.target_modules == ours.peft.target_modules);
    REQUIRE(back.modules.size() == ours.modules.size());
    for (size_t i = 0; i < back.modules.size(); ++i) {
      const AdapterModule &got = back.modules[i], &expected = ours.modules[i];
      CHECK((got.module == expected.module && got.expert == expected.expert && got.experts == 5));
      CHECK((got.a == expected.a && got.b == expected.b && got.scale == expected.scale));
    }
    // As a checkpoint has them, and read from there.
    const auto tensors = adapter_tensors(back.modules, "these adapters");
    CHECK(tensors->at(path + "linear_fc2.adapter.linear_in.weight").shape == Shape{5, 3, 14});
    CHECK(tensors->at(path + "linear_fc2.adapter.linear_out.weight").shape == Shape{5, 24, 3});
    config::PeftConfig peft = back.peft;
    const AdapterSet stored = read_adapters(*tensors, peft, m);
    REQUIRE(stored.modules.size() == ours.modules.size());
    for (size_t i = 0; i < stored.modules.size(); ++i)
      CHECK((stored.modules[i].a == ours.modules[i].a && stored.modules[i].b == ours.modules[i].b &&
             stored.modules[i].expert == ours.modules[i].expert));
    config::ModelConfig other = m;
    other.num_moe_experts = 4;
    CHECK(holds(error_of([&] { read_adapters(*tensors, peft, other); }), "of 5 and 5 experts instead of 4"));

    // Some of the experts.
    PeftAdapter some = read;
    std::erase_if(some.modules, [](const AdapterModule& module) {
      return module.module.find("experts.2.") != std::string::npos;
    });
    CHECK(holds(error_of([&] { base.set(some); }), "has adapters of 4 of the 5 experts of `" + path));
    // DoRA.
    PeftAdapter dora = read;
    dora.config.dora = true;
    for (AdapterModule& module : dora.modules) module.magnitude.assign(static_cast<size_t>(module.out), 1);
    CHECK(holds(error_of([&] { base.set(dora); }), "has magnitudes (DoRA) for the expert `model.layers.1."));
  }
}

TEST_CASE("layers_pattern names what stands before the index of a layer, as in PEFT") {
  const auto config = [](const std::string& pattern) {
    auto json = ordered_json_of(read_file(kFormatFixtures / "adapters/lora/adapter_config.json"));
    json["layers_to_transform"] = {1}, json["layers_pattern"] = json_of(pattern);
    return parse_peft_config(dump_json(json), "adapter_config.json");
  };
  const std::string expert = "model.layers.1.mlp.experts.3.q_proj",
                    other = "model.layers.0.mlp.experts.1.q_proj";
  for (const std::string pattern : {"\"layers\"", "[\"layers\"]", "[\"h\", \"layers\", \"experts\"]"}) {
    CAPTURE(pattern);
    CHECK(config(pattern).adapts(expert));
    CHECK_FALSE(config(pattern).adapts(other));
    CHECK_FALSE(config(pattern).adapts("model.players.1.q_proj"));
    CHECK_FALSE(config(pattern).adapts("model.layers.mlp.1.q_proj"));
  }
  // Without a pattern any name will do, and the last number counts.
  for (const std::string pattern : {"null", "\"\"", "[]", "\"experts\""}) {
    CAPTURE(pattern);
    CHECK_FALSE(config(pattern).adapts(expert));
    CHECK(config(pattern).adapts(other));
  }
  CHECK(holds(error_of([&] { config("\"layer.?\""); }), "`layers_pattern` has the regular expression"));
}

TEST_CASE("adapters that Capstan does not support are refused by name") {
  const auto text = read_file(kFormatFixtures / "adapters/lora/adapter_config.json");
  const auto changed = [&](const std::string& from, const std::string& to) {
    std::string copy = text;
    REQUIRE(copy.find(from) != std::string::npos);
    copy.replace(copy.find(from), from.size(), to);
    return error_of([&] { parse_peft_config(copy, "adapter_config.json"); });
  };
  CHECK(changed("\"r\": 3", "\"r\": 4").empty());
  CHECK(holds(changed("\"LORA\"", "\"IA3\""), "IA3"));
  CHECK(holds(changed("\"bias\": \"none\"", "\"bias\": \"all\""), "`bias`"));
  CHECK(holds(changed("\"modules_to_save\": null", "\"modules_to_save\": [\"lm_head\"]"), "modules_to_save"));
  CHECK(holds(changed("\"lora_bias\": false", "\"lora_bias\": true"), "lora_bias"));
  CHECK(
      holds(changed("\"layer_replication\": null", "\"layer_replication\": [[0, 1]]"), "layer_replication"));
  CHECK(holds(changed("\"init_lora_weights\": true", "\"init_lora_weights\": \"pissa\""), "pissa"));
  CHECK(
      holds(changed("\"rank_pattern\": {}", "\"rank_pattern\": {\"layers.[01]\": 2}"), "regular expression"));
  CHECK(holds(changed("\"r\": 3", "\"r\": 0"), "`r`"));
  CHECK(holds(changed("\"r\": 3", "\"r\": 3.5"), "`r`"));
  CHECK(holds(changed("\"r\": 3", "\"r\": 3, \"r\": 3"), "duplicate"));

  Base base("llama");
  PeftAdapter wrong = read_peft(kFormatFixtures / "adapters/lora");
  wrong.modules[0].module = "model.layers.0.self_attn.q_prj";
  wrong.modules[1].in += 1;
  const std::string said = error_of([&] { base.set(wrong); });
  CHECK(holds(said, "2 differences"));
  CHECK(holds(said,
              "no linear layer `model.layers.0.self_attn.q_prj`; near: `model.layers.0.self_attn.q_proj`"));
  CHECK(holds(said, "inputs"));
  wrong = read_peft(kFormatFixtures / "adapters/lora");
  wrong.modules[0].rank = 1000;
  CHECK(holds(error_of([&] { base.set(wrong); }), "has the rank 1000"));

  // The file contains tensors of a module that the lists exclude.
  test::TemporaryDirectory home;
  int number = 0;
  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
           {"\"exclude_modules\": null", "\"exclude_modules\": [\"v_proj\"]"},
           {"\"layers_to_transform\": null", "\"layers_to_transform\": 0"},
           {"\"layers_to_transform\": null", "\"layers_to_transform\": [0, 7]"},
           {"\"q_proj\"", "\"nothing\""}}) {
    const fs::path directory = home.path() / ("lists" + std::to_string(number++));
    fs::create_directory(directory);
    fs::copy_file(kFormatFixtures / "adapters/lora/adapter_model.safetensors",
                  directory / "adapter_model.safetensors");
    std::string edited = text;
    REQUIRE(edited.find(from) != std::string::npos);
    std::ofstream(directory / "adapter_config.json") << edited.replace(edited.find(from), from.size(), to);
    CHECK(holds(error_of([&] { read_peft(directory); }), "does not adapt: \"model.layers."));
  }

  fs::create_directory(home.path() / "ranks");
  fs::copy_file(kFormatFixtures / "adapters/lora/adapter_model.safetensors",
                home.path() / "ranks/adapter_model.safetensors");
  std::string other = text;
  std::ofstream(home.path() / "ranks/adapter_config.json")
      << other.replace(other.find("\"r\": 3"), 6, "\"r\": 4");
  CHECK(holds(error_of([&] { read_peft(home.path() / "ranks"); }), "has the rank 3, and `"));

  fs::copy_file(kFormatFixtures / "adapters/lora/adapter_config.json", home.path() / "adapter_config.json");
  std::ofstream(home.path() / "adapter_model.bin") << "\x80\x02";
  CHECK(holds(error_of([&] { read_peft(home.path()); }), "none is ever run"));
}
