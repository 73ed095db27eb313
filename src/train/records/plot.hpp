// Curves of runs as one self-contained HTML page.
#pragma once

#include <filesystem>
#include <span>
#include <string>

namespace capstan::records {

// Loss (training and validation), gradient norm, learning rate, tokens/s, MFU, memory, and with experts the
// load of the busiest one of each layer and the losses of the routers, over steps, a line per run, from each
// run's metrics.jsonl; and a map of the load of each expert (ExpertLoads). Long runs are thinned to at most
// 1500 points a curve, those of layers to fewer, which keep each interval's lowest and highest value. Throws
// ErrorCode::not_found for a directory that is not a run or has no metrics.
std::string plot_html(std::span<const std::filesystem::path> runs);

}  // namespace capstan::records
