// The bodies of `capstan data prepare` and `capstan data inspect`: names and files in, a result to print out.
// The command line parses flags into these structs, prints what they return and shows progress; it decides
// nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/inspect.hpp"
#include "data/prepare.hpp"

namespace capstan::data {

struct PrepareCommand {
  std::vector<std::string> inputs;          // FILE…: files and directories
  std::string tokenizer;                    // --tokenizer: tokenizer.json, a directory with one, or `bytes`
  std::shared_ptr<const Tokenizer> loaded;  // what that name stands for; null: it is loaded from it
  std::string output;                       // --output PREFIX
  std::vector<std::string> json_keys = {"text"};  // --json-keys
  bool append_eod = false;                        // --append-eod
  std::optional<std::string> eod;                 // --eod TOKEN; default: the tokenizer's own end of document
  std::string format = "auto";                    // --format auto|json|text
  // --documents auto|blank-line|separator|file: what ends a document of plain text
  std::string documents = "auto";
  std::optional<std::string> separator;  // --separator LINE (implies --documents separator)
  std::string on_bad_line = "fail";      // --on-bad-line fail|skip
  int workers = 0;                       // --workers; 0: the cores of this process
  bool overwrite = false;                // --overwrite
  std::function<void(const PrepareProgress&)> progress;
};
// ErrorCode::usage for an unknown word or token, otherwise what prepare() throws.
PrepareResult run_prepare(const PrepareCommand& verb);
// What was made, for people: a few lines, with the command that looks at it.
std::string to_text(const PrepareResult& result);
std::string to_json(const PrepareResult& result);  // one JSON object
// "12.3 MB/s  4.1M tokens  63 %  8s left": one line of progress without a line break.
std::string to_text(const PrepareProgress& progress);

struct InspectCommand {
  std::string prefix;                       // PREFIX, with or without .bin/.idx
  std::optional<std::string> tokenizer;     // --tokenizer: samples are decoded
  std::shared_ptr<const Tokenizer> loaded;  // as in PrepareCommand
  int64_t samples = 3;                      // --samples
  int64_t sample_tokens = 32;               // --sample-tokens
  bool scan_tokens = false;                 // --scan: read every token
};
// ErrorCode::config where the dataset was prepared with another tokenizer, ::format for ids that the tokenizer lacks.
DatasetReport run_inspect(const InspectCommand& verb);  // print with to_text_report or to_json_report

}  // namespace capstan::data
