#include "train/adapters/base_model.hpp"

#include "checkpoint/store.hpp"
#include "comm/collective_errors.hpp"
#include "config/core/external.hpp"
#include "formats/hf_directory.hpp"
#include "train/records/run_list.hpp"

namespace capstan::train {

BaseModel BaseModel::open(const std::string& name) {
  if (config::is_external_model("model", name)) return open_verified(name);
  return open_verified(checkpoint::resolve_checkpoint(records::saved_in(name)).path.string());
}

BaseModel BaseModel::open_verified(const std::string& path) {
  BaseModel base;
  base.path_ = path;
  if (config::is_external_model("model", path))
    base.external_ = formats::ExternalModel::open(path);
  else
    base.reader_ = checkpoint::Reader::open(path, checkpoint::Verification::structure);
  return base;
}

const std::string& BaseModel::hash() {
  if (hash_.empty())
    hash_ = external_ ? external_->content_hash() : checkpoint::hash_of(manifest_text(reader_->manifest()));
  return hash_;
}

void BaseModel::share_hash(comm::Communicator& ranks) {
  if (external_) hash_ = comm::gather_texts(ranks, ranks.rank() == 0 ? hash() : "")[0];
}

checkpoint::TensorSource& BaseModel::parameters(const config::ModelConfig& model) {
  if (reader_) return *reader_;
  parameters_ = external_->parameters(model);
  return *parameters_;
}

int64_t BaseModel::prediction_layers() const {
  if (external_) return external_->prediction_layers().count;
  int64_t count = 0;
  while (reader_->find("mtp.layers." + std::to_string(count) + ".eh_proj.weight")) ++count;
  return count;
}

formats::Assets BaseModel::assets() const {
  return external_ ? external_->assets() : assets_in(*reader_);
}

formats::Assets assets_in(const checkpoint::Reader& reader) {
  formats::Assets files;
  for (const std::string_view name : formats::asset_files())
    if (reader.has_file(name)) files.emplace_back(name, reader.read_text(name));
  return files;
}

}  // namespace capstan::train
