// Compares the end-of-document token of a run with the documents of an indexed dataset.
#pragma once

#include <string>

#include "data/indexed_dataset.hpp"
#include "data/sample.hpp"
#include "text/tokenizer/tokenizer.hpp"

namespace capstan::data {

// ErrorCode::config where an option reads document ends (DocumentOptions::reads_eod) that the dataset lacks:
// by its record, or without one by a scan of up to TokenizerCheck::kScannedTokens tokens. Returns a warning
// if the record names another token and no option reads it; empty: nothing is wrong. tokenizer: for the
// texts of the tokens in messages, or null.
std::string check_document_ends(const IndexedDataset& dataset, const DocumentOptions& documents,
                                const text::Tokenizer* tokenizer);

}  // namespace capstan::data
