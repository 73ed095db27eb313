#include "config/sections/sections.hpp"

namespace capstan::config {

void describe(Section<PeftConfig>& s) {
  using P = PeftConfig;
  s.doc("parameter-efficient fine-tuning: few trainable parameters beside frozen weights (LoRA, DoRA)");
  s.field("scheme", &P::scheme).doc("adapter method").alias("type");
  s.field("target_modules", &P::target_modules)
      .doc(
          "modules that get an adapter: a name, or a glob pattern on the full path such as "
          "`*.layers.0.*.linear_qkv`");
  s.field("exclude_modules", &P::exclude_modules).doc("modules that get no adapter");
  s.field("dim", &P::dim)
      .doc("rank r of the low-rank update; typical: 8 to 64")
      .unit("elements")
      .min(1)
      .alias("r")
      .alias("rank");
  s.field("alpha", &P::alpha)
      .doc("scaling numerator: the update is multiplied by alpha / dim; typical: dim to 2 * dim")
      .above(0)
      .alias("lora_alpha");
  s.field("use_rslora", &P::use_rslora).doc("rank-stabilized LoRA: multiply the update by alpha / sqrt(dim)");
  s.field("lora_plus_ratio", &P::lora_plus_ratio)
      .doc("LoRA+: ratio of the learning rate of B to that of A; typical: 16; null: 1")
      .above(0)
      .known_as("loraplus_lr_ratio");
  s.field("dropout", &P::dropout)
      .doc("dropout probability of the adapter input")
      .fraction()
      .min(0)
      .below(1)
      .alias("lora_dropout");
  s.field("dropout_position", &P::dropout_position)
      .doc("position of the dropout relative to the adapter")
      .unsupported("dropout after the adapter", [](const Value& v) { return v.text == "post"; });
  const auto new_adapters = [](const Config& c) { return c.peft && !c.peft->adapter; };
  s.field("lora_A_init", &P::lora_a_init)
      .doc("initialization of A")
      .used_when<Config>("`peft.adapter` is null", new_adapters);
  s.field("lora_B_init", &P::lora_b_init)
      .doc("initialization of B")
      .used_when<Config>("`peft.adapter` is null", new_adapters);
  s.field("lora_dtype", &P::lora_dtype).doc("number format of the adapter weights");
  s.field("random_base", &P::random_base)
      .doc(
          "initialize the frozen weights from the seed instead of checkpoint.pretrained_checkpoint, to test "
          "a recipe");
  const auto nf4 = [](const Config& c) {
    return c.peft && c.peft->base_quantization == BaseQuantization::nf4;
  };
  const char* quantized = "`peft.base_quantization` is nf4";
  s.field("base_quantization", &P::base_quantization)
      .doc("quantization of the frozen weights of the linear layers");
  s.field("quantization_block", &P::quantization_block)
      .doc("consecutive elements that share a scale; typical: 64")
      .unit("elements")
      .range(32, 4096)
      .used_when<Config>(quantized, nf4);
  s.field("quantization_double", &P::quantization_double)
      .doc("double quantization: quantize the scales to 8 bits in blocks of 256")
      .used_when<Config>(quantized, nf4);
  s.field("adapter", &P::adapter)
      .doc("initial adapter weights: a directory in PEFT format, a checkpoint or a run; null: new adapters");
}

}  // namespace capstan::config
