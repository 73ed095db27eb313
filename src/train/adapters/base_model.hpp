// The base model of adapters, or other pretrained weights: a Capstan checkpoint, or a model of another
// program.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/reader.hpp"
#include "comm/communicator.hpp"
#include "formats/convert.hpp"
#include "formats/external_model.hpp"

namespace capstan::train {

class BaseModel {
 public:
  // Opens a checkpoint, a directory of checkpoints, a run, `hf:DIR` or `gguf:FILE`. The contents of a
  // checkpoint are verified.
  static BaseModel open(const std::string& name);
  // Opens a checkpoint that has been verified already.
  static BaseModel open_verified(const std::string& path);

  // Directory of the checkpoint, or the name of the external model (`hf:DIR`, `gguf:FILE`).
  const std::string& path() const { return path_; }
  // Hash of the checkpoint's manifest, which holds the hashes of its files. The hash of an external model is
  // computed from its files, which reads all of them.
  const std::string& hash();
  // Collective; call it before hash(). Rank 0 computes the hash of an external model and broadcasts it.
  void share_hash(comm::Communicator& ranks);
  // The parameters under Capstan's names, for a model section with its derived values. The result refers to
  // this object and is valid until the next call.
  checkpoint::TensorSource& parameters(const config::ModelConfig& model);
  // The assets that exist, such as config.json and the tokenizer.
  formats::Assets assets() const;
  // Number of layers of multi-token prediction that the weights have.
  int64_t prediction_layers() const;
  // Null for an external model.
  const checkpoint::Reader* checkpoint() const { return reader_ ? &*reader_ : nullptr; }
  // Null for a checkpoint.
  const formats::ExternalModel* external() const { return external_.get(); }

 private:
  std::string path_, hash_;
  std::optional<checkpoint::Reader> reader_;
  std::unique_ptr<formats::ExternalModel> external_;
  std::unique_ptr<checkpoint::TensorSource> parameters_;
};

// Returns the files of asset_files() that a checkpoint contains.
formats::Assets assets_in(const checkpoint::Reader& reader);

}  // namespace capstan::train
