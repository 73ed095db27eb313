// The weights beside which adapters stand: a checkpoint of ours, or another program's model.
#pragma once

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
  // A checkpoint, a directory of checkpoints, a run, `hf:DIR` or `gguf:FILE`; a checkpoint's contents are
  // verified.
  static BaseModel open(const std::string& name);
  // The same for a checkpoint that has been verified already.
  static BaseModel open_verified(const std::string& path);

  const std::string& path() const { return path_; }  // the checkpoint's directory, or `hf:DIR` …
  // Of its manifest, which holds the hashes of its files; of another program's files themselves, which reads
  // them all.
  const std::string& hash();
  // Collective, before hash(): rank 0 reads an external model's files for it, and broadcasts the hash.
  void share_hash(comm::Communicator& ranks);
  // Under Capstan's names, for a model section with its derived values; refers to this, until the next call.
  checkpoint::TensorSource& parameters(const config::ModelConfig& model);
  // config.json, tokenizer and the like, as far as they are there.
  formats::Assets assets() const;
  const checkpoint::Reader* checkpoint() const {
    return reader_ ? &*reader_ : nullptr;
  }  // null: another program's

 private:
  std::string path_, hash_;
  std::optional<checkpoint::Reader> reader_;
  std::unique_ptr<formats::ExternalModel> external_;
  std::unique_ptr<checkpoint::TensorSource> parameters_;
};

// Those of asset_files() that lie in a checkpoint.
formats::Assets assets_in(const checkpoint::Reader& reader);

}  // namespace capstan::train
