// YaRN of Megatron's multi-latent attention, whose fields have the same names in Megatron-Bridge and on the
// command line, there with other defaults.
#include <algorithm>
#include <utility>

#include "base/text.hpp"
#include "config/sections/rotary.hpp"
#include "importers/rule.hpp"

namespace capstan::importers {

namespace {

// Takes the two coefficients of the attention scaling. Megatron's mscale_all_dim of 0 is null here; the
// recipe's mscale is read only beside the other, so that its factor is written.
void take_mscale(Reader& r, const std::string& mscale, const std::string& all_dim, double factor) {
  const double numerator = r.real(mscale).value_or(1), denominator = r.real(all_dim).value_or(0);
  if (denominator != 0) {
    if (!r.copy("model.rope_scaling_mscale", mscale))
      r.draft.assume("model.rope_scaling_mscale", "1", "Megatron's default");
    r.copy("model.rope_scaling_mscale_all_dim", all_dim);
    return;
  }
  if (numerator != 1)
    r.set("model.rope_scaling_attention_factor", to_text(config::yarn_mscale(factor, numerator)), mscale,
          "0.1 mscale ln(factor) + 1");
  for (const std::string& key : {mscale, all_dim})
    if (r.given(key) && !r.draft.mentions(key)) r.omit(key, OmissionReason::same, "the factor of the paper");
}

}  // namespace

void take_latent_rope(Reader& r, std::string_view prefix, double default_factor) {
  const auto key = [&](std::string_view field) {
    std::string text(field);
    if (prefix == "--") std::ranges::replace(text, '_', '-');
    return std::string(prefix) + text;
  };
  const std::string latent = key("multi_latent_attention"), factor_key = key("rotary_scaling_factor"),
                    type = key("rope_type"), mscale = key("mscale"), all_dim = key("mscale_all_dim"),
                    original = key("original_max_position_embeddings"), fast = key("beta_fast"),
                    slow = key("beta_slow");
  const auto leave_out = [&](OmissionReason why, const std::string& reason) {
    for (const std::string& one : {type, factor_key, original, fast, slow, mscale, all_dim})
      if (r.given(one) && !r.draft.mentions(one)) r.omit(one, why, reason);
  };
  if (!r.is_true(latent))
    return leave_out(OmissionReason::no_effect, "YaRN is read with multi-latent attention");
  const double factor = r.real(factor_key).value_or(default_factor);
  if (factor <= 1) return leave_out(OmissionReason::off, "a factor of 1 does not scale RoPE");
  if (r.text(type).value_or("yarn") != "yarn") {
    if (r.real(all_dim).value_or(0) != 0)
      r.omit(all_dim, OmissionReason::to_fill_in, "scales the softmax without YaRN too: model.softmax_scale");
    return leave_out(OmissionReason::no_effect, "RoPE is not scaled");
  }
  r.set("model.rope_scaling", "true", latent, "RoPE is scaled by YaRN there");
  r.set("model.rope_scaling_type", "yarn", r.given(type) ? type : latent);
  if (!r.copy("model.rope_scaling_factor", factor_key))
    r.draft.assume("model.rope_scaling_factor", to_text(default_factor), "Megatron's default");
  if (!r.copy("model.rope_scaling_original_max_position_embeddings", original))
    r.draft.assume("model.rope_scaling_original_max_position_embeddings", "4096", "Megatron's default");
  for (const auto& [path, from] :
       {std::pair("model.rope_scaling_beta_fast", fast), std::pair("model.rope_scaling_beta_slow", slow)})
    if (r.given(from)) r.draft.set_if_other(path, *r.find(from), r.from(from));
  take_mscale(r, mscale, all_dim, factor);
}

}  // namespace capstan::importers
