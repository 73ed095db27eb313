// The processor's tile unit (Intel AMX): tiles of 16 rows of 64 bytes, of which one instruction multiplies
// two and adds to a third of 16 x 16 fp32 sums.
#pragma once

// CAPSTAN_AMX_EMULATION compiles the same code for a test with an emulated tile unit
// (tests/kernels/emulated_amx.hpp).
#if (defined(__x86_64__) && defined(__linux__)) || defined(CAPSTAN_AMX_EMULATION)
#define CAPSTAN_AMX_CODE
#endif

namespace capstan::kernels {

// True where kernels use the tile unit: cpu_level() is `amx`.
bool runs_amx();

namespace amx {
// Configure and release the tile unit of the calling thread.
void configure_tiles();
void release_tiles();

// Configures the tile unit of the calling thread for its lifetime.
class TileConfig {
 public:
  TileConfig() { configure_tiles(); }
  ~TileConfig() { release_tiles(); }
  TileConfig(const TileConfig&) = delete;
  TileConfig& operator=(const TileConfig&) = delete;
};
}  // namespace amx

}  // namespace capstan::kernels
