#include "text/tokenizer/model.hpp"

namespace capstan::text {

void Model::encode(const PieceBatch& batch, Scratch& scratch, std::vector<int32_t>& out) const {
  std::vector<ModelToken> tokens;
  for (const std::string_view piece : batch.pieces) {
    tokens.clear();
    encode_piece(piece, scratch, tokens);
    for (const ModelToken& token : tokens) out.push_back(token.id);
  }
}

}  // namespace capstan::text
