#include "config/sections/sections.hpp"

namespace capstan::config {

void describe(Section<PeftConfig>& s) {
  using P = PeftConfig;
  s.doc("adapters: few trained parameters beside frozen weights");
  s.field("scheme", &P::scheme).doc("which adapter").alias("type");
  s.field("target_modules", &P::target_modules)
      .doc(
          "layers that get an adapter: a name, or a pattern on the whole path such as "
          "`*.layers.0.*.linear_qkv`");
  s.field("exclude_modules", &P::exclude_modules).doc("layers that get none");
  s.field("dim", &P::dim).doc("rank of the update").unit("elements").min(1).alias("r").alias("rank");
  s.field("alpha", &P::alpha).doc("the update is multiplied by alpha / dim").above(0).alias("lora_alpha");
  s.field("use_rslora", &P::use_rslora).doc("the update is multiplied by alpha / sqrt(dim)");
  s.field("lora_plus_ratio", &P::lora_plus_ratio)
      .doc("LoRA+: learning rate of B over that of A; null: the same")
      .above(0)
      .known_as("loraplus_lr_ratio");
  s.field("dropout", &P::dropout)
      .doc("dropout of the adapter")
      .fraction()
      .min(0)
      .below(1)
      .alias("lora_dropout");
  s.field("dropout_position", &P::dropout_position)
      .doc("before or after the adapter")
      .not_yet("dropout after the adapter", [](const Value& v) { return v.text == "post"; });
  s.field("lora_A_init", &P::lora_a_init).doc("initialisation of A");
  s.field("lora_B_init", &P::lora_b_init).doc("initialisation of B");
  s.field("lora_dtype", &P::lora_dtype).doc("number format of the adapter");
  s.field("random_base", &P::random_base)
      .doc(
          "the frozen weights are first values from the seed instead of checkpoint.pretrained_checkpoint, to "
          "see that a recipe works (`--shrink`)");
  const auto nf4 = [](const Config& c) {
    return c.peft && c.peft->base_quantization == BaseQuantization::nf4;
  };
  const char* quantized = "`peft.base_quantization` is nf4";
  s.field("base_quantization", &P::base_quantization)
      .doc("how the frozen weights of the layers' linear maps are kept");
  s.field("quantization_block", &P::quantization_block)
      .doc("neighbouring elements that share a scale")
      .unit("elements")
      .range(32, 4096)
      .used_when<Config>(quantized, nf4);
  s.field("quantization_double", &P::quantization_double)
      .doc("quantise the scales too, to 8 bits in blocks of 256")
      .used_when<Config>(quantized, nf4);
  s.field("adapter", &P::adapter)
      .doc("adapters to start from: a directory in PEFT's format, a checkpoint or a run; null: new ones");
}

}  // namespace capstan::config
