#include "data/sft_dataset.hpp"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <set>
#include <tuple>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/philox.hpp"
#include "base/text.hpp"
#include "base/thread_pool.hpp"
#include "base/wording.hpp"
#include "data/chat_prompt.hpp"
#include "data/permutation.hpp"
#include "data/record_problem.hpp"
#include "data/record_reader.hpp"

namespace capstan::data {

void SftSamples::add(const EncodedSample& sample, size_t tokens, int32_t file, int64_t line) {
  constexpr size_t kBlockTokens = 1 << 20;
  if (blocks_.empty() || block_used_ + tokens > block_size_) {
    block_size_ = std::max(kBlockTokens, tokens), block_used_ = 0;
    blocks_.push_back(std::make_unique<uint32_t[]>(block_size_));
    block_bytes_ += static_cast<int64_t>(block_size_ * sizeof(uint32_t));
  }
  uint32_t* const to = blocks_.back().get() + block_used_;
  for (size_t i = 0; i < tokens; ++i)
    to[i] = static_cast<uint32_t>(sample.ids[i]) | (sample.loss_mask[i] ? kLossToken : 0);
  block_used_ += tokens;
  samples_.push_back({to, static_cast<uint32_t>(tokens), file, line});
}

int64_t SftSamples::bytes() const {
  return block_bytes_ + count() * static_cast<int64_t>(sizeof(Sample));
}

std::span<const uint32_t> SftSamples::tokens(int64_t sample) const {
  const Sample& at = samples_[static_cast<size_t>(sample)];
  return {at.tokens, at.count};
}

std::string SftSamples::location(int64_t sample) const {
  const Sample& at = samples_[static_cast<size_t>(sample)];
  return files[static_cast<size_t>(at.file)] + ":" + std::to_string(at.line);
}

// ---------------------------------------------------------------------------------------------- reading

namespace {

// A batch of short tokens takes about ten times as much memory once it is encoded.
constexpr int64_t kReadBytes = 1 << 20;
constexpr int64_t kTileRecords = 2;
constexpr size_t kMaxReports = 20;

// Whether a record has an answer that counts in the loss and has no text.
bool has_empty_answer(const SftRecord& record) {
  if (const auto* text = std::get_if<SftText>(&record.what)) return trim(text->completion).empty();
  const auto& dialogue = std::get<SftDialogue>(record.what);
  const auto& messages = dialogue.conversation.messages;
  for (size_t i = 0; i < messages.size(); ++i) {
    const text::chat::Map* message = messages[i].map();
    const text::chat::Value* role = message ? message->find("role") : nullptr;
    if (!role || !role->text() || *role->text() != "assistant" || !dialogue.in_loss[i]) continue;
    const text::chat::Value *content = message->find("content"), *calls = message->find("tool_calls");
    const bool blank = !content || content->is_none() || (content->text() && trim(*content->text()).empty());
    if (blank && (!calls || calls->is_none())) return true;
  }
  return false;
}

class FileReader {
 public:
  FileReader(const SftOptions& options, const SftEncoder& encoder, ThreadPool& pool)
      : options_(options), encoder_(encoder), pool_(pool), parsers_(static_cast<size_t>(pool.size())) {}

  // Keeps at most `most` samples.
  std::shared_ptr<SftSamples> read(const std::vector<std::string>& names, SftCounts& counts,
                                   std::optional<int64_t> most) {
    RecordOptions records;
    records.format = InputFormat::json;
    records.limits = options_.limits;
    records.max_record_bytes = options_.max_record_bytes;
    RecordReader reader(expand_inputs(names), records);
    auto samples = std::make_shared<SftSamples>();
    for (const InputFile& file : reader.files()) samples->files.push_back(file.path);
    formats_.assign(reader.files().size(), options_.format);
    RecordBatch batch;
    while ((!most || samples->count() < *most) && reader.next(batch, kReadBytes)) {
      encode(batch, samples->files);
      for (size_t i = 0; i < batch.records.size() && (!most || samples->count() < *most); ++i)
        take(batch.records[i], i, *samples, counts);
    }
    return samples;
  }

 private:
  struct Result {
    EncodedSample sample;
    // "file:line:column: reason" if the record is no sample.
    std::string problem;
    std::string help;
    bool empty_answer = false, dialogue = false;
  };

  // Each file has one format, that of its first sample.
  void find_formats(const RecordBatch& batch) {
    for (const Record& record : batch.records) {
      SftFormat& format = formats_[static_cast<size_t>(record.file)];
      if (format != SftFormat::automatic || !record.problem.empty()) continue;
      try {
        format = parsers_[0].parse(batch.of(record), SftFormat::automatic).format;
      } catch (const Error&) {
        // encode() reports the problem.
      }
    }
  }

  void encode(const RecordBatch& batch, const std::vector<std::string>& files) {
    find_formats(batch);
    const auto count = static_cast<int64_t>(batch.records.size());
    results_.assign(batch.records.size(), {});
    pool_.parallel_for(ceil_div(count, kTileRecords), [&](int64_t tile, int worker) {
      for (int64_t i = tile * kTileRecords; i < std::min(count, (tile + 1) * kTileRecords); ++i) {
        const Record& record = batch.records[static_cast<size_t>(i)];
        Result& result = results_[static_cast<size_t>(i)];
        const std::string_view text = batch.of(record);
        const std::string& path = files[static_cast<size_t>(record.file)];
        size_t byte = 0;
        try {
          if (!record.problem.empty()) fail(ErrorCode::format, record.problem);
          const SftRecord parsed = parsers_[static_cast<size_t>(worker)].parse(
              text, formats_[static_cast<size_t>(record.file)], &byte);
          result.empty_answer = has_empty_answer(parsed);
          result.dialogue = std::holds_alternative<SftDialogue>(parsed.what);
          result.sample = encoder_.encode(parsed);
        } catch (Error& error) {
          // A missing setting of the recipe is not a problem of the line.
          if (error.code() != ErrorCode::format)
            throw error.in("while reading " + location_of(record, text, byte, path));
          result.problem = location_of(record, text, byte, path) + ": " + error.message();
          result.help = error.marked_help();
        }
      }
    });
  }

  // Names the bad line `first` of the batch and those after it.
  [[noreturn]] void refuse_bad_lines(size_t first) const {
    constexpr size_t kNamed = 10;
    std::string message = results_[first].problem;
    size_t bad = 1;
    for (size_t i = first + 1; i < results_.size(); ++i)
      if (!results_[i].problem.empty() && ++bad <= kNamed) message += "\n    " + results_[i].problem;
    if (bad > kNamed)
      message += "\n    and " + counted(static_cast<int64_t>(bad - kNamed), "further bad line");
    const std::string& help = results_[first].help;
    fail(ErrorCode::format, message,
         help.empty() ? "dataset.on_bad_line=skip leaves such lines out and counts them" : help);
  }

  void take(const Record& record, size_t index, SftSamples& samples, SftCounts& counts) {
    const Result& result = results_[index];
    ++counts.records;
    if (!result.problem.empty()) {
      if (options_.on_bad_line == OnBadLine::fail) refuse_bad_lines(index);
      ++counts.bad;
      if (counts.reports.size() < kMaxReports) counts.reports.push_back(result.problem);
      return;
    }
    const auto note = [&](std::vector<std::string>& locations) {
      if (locations.size() < kMaxReports)
        locations.push_back(samples.files[static_cast<size_t>(record.file)] + ":" +
                            std::to_string(record.line));
    };
    if (result.empty_answer) ++counts.empty_answers, note(counts.empty_locations);
    const EncodedSample& sample = result.sample;
    const auto space = static_cast<size_t>(options_.sequence_length) + 1;
    if (sample.ids.size() > space && !options_.truncate) {
      ++counts.dropped;
      return;
    }
    const size_t kept = std::min(sample.ids.size(), space);
    // The first token is never predicted.
    const auto loss_tokens =
        kept < 2 ? 0
                 : std::count(sample.loss_mask.begin() + 1,
                              sample.loss_mask.begin() + static_cast<std::ptrdiff_t>(kept), true);
    if (loss_tokens == 0) {
      ++counts.without_loss;
      if (std::find(sample.loss_mask.begin() + static_cast<std::ptrdiff_t>(kept), sample.loss_mask.end(),
                    true) != sample.loss_mask.end())
        ++counts.truncated_answers;
      note(counts.without_loss_locations);
      return;
    }
    if (kept < sample.ids.size()) ++counts.truncated;
    ++counts.samples;
    counts.dialogues += result.dialogue ? 1 : 0;
    counts.tokens += static_cast<int64_t>(kept);
    counts.loss_tokens += loss_tokens;
    samples.add(sample, kept, record.file, record.line);
  }

  const SftOptions& options_;
  const SftEncoder& encoder_;
  ThreadPool& pool_;
  std::vector<SftRecordParser> parsers_;
  std::vector<SftFormat> formats_;
  std::vector<Result> results_;
};

std::string left_out(const SftCounts& counts) {
  std::string text;
  const auto add = [&](int64_t count, const char* what) {
    if (count > 0) text += "; " + with_separators(count) + " " + what;
  };
  add(counts.truncated, "truncated");
  add(counts.dropped, "dropped as too long");
  add(counts.without_loss, "left out without loss tokens");
  if (counts.truncated_answers > 0)
    text += " (" + with_separators(counts.truncated_answers) + " of them by truncation to model.seq_length)";
  add(counts.bad, counts.bad == 1 ? "bad line skipped" : "bad lines skipped");
  if (counts.of_all_splits && !text.empty()) text += " (in all splits)";
  return text;
}

// Checks the template that renders dialogues.
std::string check_turn_end(const SftOptions& options) {
  const auto chat_template =
      options.chat_template ? options.chat_template : text::chat::ChatTemplate::load("alpaca");
  return turn_end_problem(*options.tokenizer, *chat_template, options.eod);
}

}  // namespace

std::array<std::shared_ptr<const SftDataset>, 3> build_sft_datasets(const SftOptions& given) {
  SftOptions options = given;
  CAPSTAN_ASSERT(options.tokenizer, "fine-tuning data need a tokenizer");
  if (options.sequence_length <= 0)
    fail(ErrorCode::config,
         "the sequence length " + std::to_string(options.sequence_length) + " is not positive");
  if (!options.chat_template) options.chat_template = own_chat_template(*options.tokenizer);
  const SftEncoder encoder(*options.tokenizer, options.chat_template, options.loss, options.eod);
  ThreadPool pool(options.threads);
  FileReader reader(options, encoder, pool);
  std::array<std::shared_ptr<const SftDataset>, 3> result;
  const auto make = [&](std::shared_ptr<const SftSamples> samples, int64_t begin, int64_t end,
                        const SftCounts& counts) {
    return begin < end ? std::make_shared<SftDataset>(std::move(samples), begin, end, counts, options)
                       : nullptr;
  };
  const auto nothing = [&](const SftCounts& counts) {
    fail(ErrorCode::failed,
         "no sample of the training files has loss tokens (" + with_separators(counts.records) + " read" +
             left_out(counts) + ")" +
             (counts.reports.empty() ? "" : "\n    " + join(counts.reports, "\n    ")),
         counts.dropped > 0             ? "dataset.too_long=truncate, or a larger model.seq_length"
         : counts.truncated_answers > 0 ? "a larger model.seq_length: the answers begin after token " +
                                              with_separators(options.sequence_length)
                                        : "");
  };
  if (!options.valid_files.empty() || !options.test_files.empty()) {
    const std::vector<std::string>* files[] = {&options.train_files, &options.valid_files,
                                               &options.test_files};
    for (size_t split = 0; split < 3; ++split) {
      if (files[split]->empty()) continue;
      SftCounts counts;
      const auto samples =
          reader.read(*files[split], counts, split == 0 ? options.max_train_samples : std::nullopt);
      if (split == 0 && counts.dialogues > 0) counts.turn_end_problem = check_turn_end(options);
      result[split] = make(samples, 0, samples->count(), counts);
      if (split == 0 && !result[0]) nothing(counts);
    }
    return result;
  }
  SftCounts counts;
  const auto samples = reader.read(options.train_files, counts, std::nullopt);
  if (samples->count() == 0) nothing(counts);
  if (counts.dialogues > 0) counts.turn_end_problem = check_turn_end(options);
  const SplitShares shares = parse_split(options.split);
  for (size_t split = 0; split < 3; ++split) {
    if (!shares[split]) continue;
    auto [begin, end] = split_range(*shares[split], samples->count());
    if (split == 0 && options.max_train_samples) end = std::min(end, begin + *options.max_train_samples);
    // The token count is that of this split; dropped samples are reported once, for all files.
    SftCounts own = split == 0 ? counts : SftCounts{};
    own.samples = end - begin, own.tokens = own.loss_tokens = 0;
    own.of_all_splits = own.samples < samples->count();
    for (int64_t i = begin; i < end; ++i) {
      const auto tokens = samples->tokens(i);
      own.tokens += static_cast<int64_t>(tokens.size());
      own.loss_tokens += std::count_if(tokens.begin() + 1, tokens.end(),
                                       [](uint32_t t) { return (t & SftSamples::kLossToken) != 0; });
    }
    result[split] = make(samples, begin, end, own);
  }
  if (!result[0])
    fail(ErrorCode::failed, "dataset.split " + options.split + " of " + with_separators(samples->count()) +
                                " samples leaves none to train on");
  return result;
}

// ---------------------------------------------------------------------------------------------- rows

struct SftDataset::Epoch {
  int64_t number = 0;
  // Samples in the order of the rows.
  std::vector<int64_t> samples;
  // Index in `samples` at which each row begins, and the end.
  std::vector<size_t> rows;
};

SftDataset::SftDataset(std::shared_ptr<const SftSamples> samples, int64_t begin, int64_t end,
                       SftCounts counts, const SftOptions& options)
    : all_(std::move(samples)),
      begin_(begin),
      count_(end - begin),
      sequence_length_(options.sequence_length),
      counts_(std::move(counts)),
      packing_(options.packing),
      seed_(options.seed),
      pad_(options.eod.value_or(0)) {
  CAPSTAN_ASSERT(count_ > 0, "a dataset of samples");
  for (int64_t i = 0; i < count_; ++i) {
    const auto length = static_cast<int64_t>(tokens(i).size());
    CAPSTAN_ASSERT(length >= 2 && length <= sequence_length_ + 1, "the length of a sample");
  }
}

// The samples, and the order of two epochs.
void SftDataset::add_memory(std::map<const void*, int64_t>& held) const {
  held[all_.get()] = all_->bytes();
  held[this] = 2 * count_ * static_cast<int64_t>(sizeof(int64_t) + sizeof(size_t));
}

std::shared_ptr<const SftDataset::Epoch> SftDataset::build(int64_t number) const {
  const auto key = [&](uint64_t use) {
    return philox_key(seed_, purpose::data_shuffle, 2 * static_cast<uint64_t>(number) + use);
  };
  const Permutation order(count_, key(0));
  const auto length = [&](int64_t sample) { return static_cast<int64_t>(tokens(sample).size()) - 1; };
  std::vector<std::vector<int64_t>> rows;
  std::vector<int64_t> window;
  for (int64_t first = 0; first < count_; first += kWindow) {
    window.clear();
    for (int64_t i = first; i < std::min(first + kWindow, count_); ++i) window.push_back(order(i));
    if (!packing_) {
      for (const int64_t sample : window) rows.push_back({sample});
      continue;
    }
    std::stable_sort(window.begin(), window.end(),
                     [&](int64_t a, int64_t b) { return length(a) > length(b); });
    // Pairs of free space and row.
    std::set<std::pair<int64_t, size_t>> open;
    for (const int64_t sample : window) {
      int64_t space = sequence_length_;
      size_t row = rows.size();
      if (const auto found = open.lower_bound({length(sample), 0}); found != open.end()) {
        std::tie(space, row) = *found;
        open.erase(found);
        rows[row].push_back(sample);
      } else {
        rows.push_back({sample});
      }
      if (space > length(sample)) open.emplace(space - length(sample), row);
    }
  }
  auto epoch = std::make_shared<Epoch>();
  epoch->number = number;
  // The first rows of a window hold the longest samples. Shuffling the rows distributes these evenly over the
  // steps.
  const auto total = static_cast<int64_t>(rows.size());
  const Permutation deal(total, key(1));
  for (int64_t i = 0; i < total; ++i) {
    const auto& row = rows[static_cast<size_t>(deal(i))];
    epoch->rows.push_back(epoch->samples.size());
    epoch->samples.insert(epoch->samples.end(), row.begin(), row.end());
  }
  epoch->rows.push_back(epoch->samples.size());
  return epoch;
}

std::pair<std::shared_ptr<const SftDataset::Epoch>, int64_t> SftDataset::epoch_of(int64_t number) const {
  CAPSTAN_ASSERT(number >= 0, "a row number");
  std::lock_guard lock(mutex_);
  const auto keep = [&](int64_t epoch) {
    auto& slot = recent_[static_cast<size_t>(epoch % 2)];
    if (!slot || slot->number != epoch) slot = build(epoch);
    return slot;
  };
  while (first_rows_.back() <= number) {
    const auto next = static_cast<int64_t>(first_rows_.size()) - 1;
    first_rows_.push_back(first_rows_.back() + static_cast<int64_t>(keep(next)->rows.size()) - 1);
  }
  const auto after = std::upper_bound(first_rows_.begin(), first_rows_.end(), number);
  return {keep(after - first_rows_.begin() - 1), number - *(after - 1)};
}

int64_t SftDataset::first_row_of(int64_t epoch) const {
  int64_t row = 0;
  for (int64_t e = 0; e < epoch; ++e) row += static_cast<int64_t>(epoch_of(row).first->rows.size()) - 1;
  return row;
}

std::vector<int64_t> SftDataset::samples_of(int64_t number) const {
  const auto [epoch, row] = epoch_of(number);
  const auto first = epoch->rows.begin() + row;
  const auto samples = epoch->samples.begin();
  return {samples + static_cast<std::ptrdiff_t>(first[0]), samples + static_cast<std::ptrdiff_t>(first[1])};
}

void SftDataset::row(int64_t number, const RowView& out) const {
  const auto length = static_cast<size_t>(sequence_length_);
  out.cu_seqlens->clear();
  size_t at = 0;
  for (const int64_t sample : samples_of(number)) {
    const auto all = tokens(sample);
    out.cu_seqlens->push_back(static_cast<int32_t>(at));
    for (size_t i = 0; i + 1 < all.size(); ++i, ++at) {
      out.tokens[at] = static_cast<int32_t>(all[i] & ~SftSamples::kLossToken);
      out.labels[at] = static_cast<int32_t>(all[i + 1] & ~SftSamples::kLossToken);
      out.loss_mask[at] = (all[i + 1] & SftSamples::kLossToken) != 0 ? 1.0f : 0.0f;
      out.position_ids[at] = static_cast<int32_t>(i);
    }
  }
  if (at < length) out.cu_seqlens->push_back(static_cast<int32_t>(at));
  if (out.length) *out.length = static_cast<int32_t>(at);
  for (int32_t position = 0; at < length; ++at, ++position) {
    out.tokens[at] = out.labels[at] = pad_;
    out.loss_mask[at] = 0;
    out.position_ids[at] = position;
  }
  out.cu_seqlens->push_back(static_cast<int32_t>(length));
}

std::string SftDataset::fingerprint() const {
  const std::array<uint64_t, 4> layout = {static_cast<uint64_t>(sequence_length_), packing_ ? 1u : 0u, seed_,
                                          static_cast<uint64_t>(count_)};
  uint64_t hash = XXH3_64bits(layout.data(), sizeof layout);
  for (int64_t i = 0; i < count_; ++i) {
    const auto all = tokens(i);
    hash = XXH3_64bits_withSeed(all.data(), all.size_bytes(), hash);
  }
  return hex(hash);
}

int64_t SftDataset::samples_in(double epochs) const {
  const double passes = std::floor(epochs);
  if (!(passes < 1e6))
    fail(ErrorCode::config, "train.epochs is more than a million passes over fine-tuning data");
  const int64_t before = first_row_of(static_cast<int64_t>(passes));
  if (passes == epochs) return before;
  const int64_t rows = first_row_of(static_cast<int64_t>(passes) + 1) - before;
  return std::max<int64_t>(
      1, before + static_cast<int64_t>(std::ceil((epochs - passes) * static_cast<double>(rows))));
}

std::vector<std::string> SftDataset::warnings() const {
  std::vector<std::string> result;
  const auto add = [&](int64_t count, const std::string& what, const std::vector<std::string>& locations) {
    if (count == 0) return;
    constexpr size_t kNamed = 5;
    std::string text = with_separators(count) + " " + what + ":";
    for (size_t i = 0; i < std::min(kNamed, locations.size()); ++i) text += "\n    " + locations[i];
    if (count > static_cast<int64_t>(kNamed)) text += "\n    …";
    result.push_back(std::move(text));
  };
  add(counts_.bad,
      counts_.bad == 1 ? "line is not a valid sample and was skipped"
                       : "lines are not valid samples and were skipped",
      counts_.reports);
  add(counts_.without_loss,
      (counts_.without_loss == 1 ? std::string("sample has no loss tokens and was left out")
                                 : std::string("samples have no loss tokens and were left out")) +
          (counts_.truncated_answers > 0 ? " (" + with_separators(counts_.truncated_answers) +
                                               " by truncation: a larger model.seq_length keeps the answers)"
                                         : ""),
      counts_.without_loss_locations);
  add(counts_.empty_answers,
      counts_.empty_answers == 1 ? "sample has an empty answer" : "samples have an empty answer",
      counts_.empty_locations);
  if (!counts_.turn_end_problem.empty()) result.push_back(counts_.turn_end_problem);
  return result;
}

std::string SftDataset::summary() const {
  const int64_t rows = epoch_samples();
  const double filled =
      static_cast<double>(counts_.tokens - counts_.samples) / static_cast<double>(rows * sequence_length_);
  return with_separators(counts_.samples) + (counts_.samples == 1 ? " sample, " : " samples, ") +
         human_count(static_cast<double>(counts_.tokens)) + " tokens (" +
         human_count(static_cast<double>(counts_.loss_tokens)) + " loss tokens) in " + with_separators(rows) +
         (rows == 1 ? " row of " : " rows of ") + std::to_string(sequence_length_) + ", " +
         fixed(100 * filled, 1) + " % filled" + left_out(counts_);
}

}  // namespace capstan::data
