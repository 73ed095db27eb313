// The channels of this process whose transfers run without the host, as its watchdog sees them.
#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/error.hpp"

namespace capstan::comm {

// A channel. The functions are called by threads of the watchdog, and must not wait for the main thread.
class WatchedTransfers {
 public:
  virtual ~WatchedTransfers() = default;
  // Publishes which batch the device works on (DeviceBatches). Returns the error of the transport, if it has
  // one: transport_error() says how it reads.
  virtual std::optional<std::string> poll() = 0;
  // From now on the channel, and the host's waits for the device, throw `error`.
  virtual void fail(const Error& error) noexcept = 0;
  // Ends the transfers under way, after fail(). May wait until those of other channels have ended too.
  virtual void abort() noexcept = 0;
};

class TransferWatch {
 public:
  // A channel adds itself, and removes itself before it is destroyed.
  void add(WatchedTransfers& transfers);
  void remove(WatchedTransfers& transfers);
  // Polls all channels, and returns the first error.
  std::optional<std::string> poll();
  // Fails all channels, those that will be added too, and ends their transfers together. May take long. A
  // second call does nothing.
  void abort(const Error& error) noexcept;

 private:
  std::mutex mutex_;
  std::vector<WatchedTransfers*> channels_;
  std::optional<Error> failure_;
};

}  // namespace capstan::comm
