#include "config/sections/sections.hpp"

namespace capstan::config {

void describe(Section<PeftConfig>& s) {
  using P = PeftConfig;
  s.doc("adapters: few trained parameters beside frozen weights");
  s.field("scheme", &P::scheme).doc("which adapter").alias("type").not_yet("adapters", [](const Value&) {
    return true;
  });
  s.field("target_modules", &P::target_modules)
      .doc(
          "layers that get an adapter: a name, or a pattern on the whole path such as "
          "`*.layers.0.*.linear_qkv`");
  s.field("exclude_modules", &P::exclude_modules).doc("layers that get none");
  s.field("dim", &P::dim).doc("rank of the update").unit("elements").min(1).alias("r").alias("rank");
  s.field("alpha", &P::alpha).doc("the update is multiplied by alpha / dim").above(0).alias("lora_alpha");
  s.field("dropout", &P::dropout)
      .doc("dropout of the adapter")
      .fraction()
      .min(0)
      .below(1)
      .alias("lora_dropout");
  s.field("dropout_position", &P::dropout_position).doc("before or after the adapter");
  s.field("lora_A_init", &P::lora_a_init).doc("initialisation of A");
  s.field("lora_B_init", &P::lora_b_init).doc("initialisation of B");
  s.field("lora_dtype", &P::lora_dtype).doc("number format of the adapter");
}

}  // namespace capstan::config
