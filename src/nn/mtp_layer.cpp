#include "nn/mtp_layer.hpp"

#include "ops/concat.hpp"

namespace capstan::nn {

MtpLayer::MtpLayer(ParamList& parameters, const ModulePath& path, const Options& options)
    : embedding_norm_(parameters, path.inside("enorm"), options.hidden, options.norm),
      hidden_norm_(parameters, path.inside("hnorm"), options.hidden, options.norm),
      projection_(parameters, path.inside("eh_proj"),
                  {.in = 2 * options.hidden, .out = options.hidden, .init = options.init}),
      layer_(options.layer(path.inside("transformer_layer"))),
      final_norm_(parameters, path.inside("final_layernorm"), options.hidden, options.norm) {}

Var MtpLayer::forward(Tape& tape, const Var& hidden_states, const Var& embedding,
                      const TokenContext& context) const {
  const Var both = ops::concat_columns(tape, embedding_norm_.forward(tape, embedding, {}).y,
                                       hidden_norm_.forward(tape, hidden_states, {}).y);
  HiddenStates states{projection_.forward(tape, both, context), {}};
  return normalize(tape, final_norm_, layer_->forward(tape, std::move(states), context)).y;
}

}  // namespace capstan::nn
