#include "kernels/cpu/amx.hpp"

#include "kernels/cpu/level.hpp"

#include "kernels/cpu/amx_core.hpp"

namespace capstan::kernels {

bool runs_amx() {
#ifdef CAPSTAN_AMX_EMULATION
  return true;
#elif defined(CAPSTAN_AMX_CODE)
  return runs(CpuLevel::amx);
#else
  return false;
#endif
}

#ifdef CAPSTAN_AMX_CODE

// All eight tiles are 16 rows of 64 bytes.
CAPSTAN_AMX_CALLED void amx::configure_tiles() {
  alignas(64) static constexpr struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_of_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } kShapes;
  _tile_loadconfig(&kShapes);
}
CAPSTAN_AMX_CALLED void amx::release_tiles() {
  _tile_release();
}

#endif

}  // namespace capstan::kernels
