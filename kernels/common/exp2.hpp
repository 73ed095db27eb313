// 2^f for f in [-1/2, 1/2] as a polynomial of degree 5: the smallest relative error (8e-8), found by weighted
// least squares.
#pragma once

namespace capstan::kernels {

inline constexpr float kExp2[6] = {1.0000000716557493f,   6.931469670562713e-1f, 2.4022119718236667e-1f,
                                   5.550713284409571e-2f, 9.675541646703789e-3f, 1.32764693998491e-3f};

}  // namespace capstan::kernels
