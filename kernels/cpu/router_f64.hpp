// The router with logits in fp64: kernels/router.hpp says what each function computes.
#pragma once

#include "kernels/router.hpp"

namespace capstan::kernels::router_f64 {

void logits(Context& c, In x, In weight, In bias, int64_t tokens, int64_t experts, int64_t hidden,
            double* logits);
void choose(Context& c, const RouterShape& r, const double* logits, const float* bias, const int32_t* padding,
            int32_t* experts);
void probabilities(Context& c, const RouterShape& r, const double* logits, const int32_t* experts, float* to);
void backward(Context& c, const RouterShape& r, const double* logits, const int32_t* experts,
              const float* dprobabilities, float* dlogits);
void loss(Context& c, const RouterLoss& l, const double* logits, const float* counts, const int32_t* padding,
          float* values);
void loss_backward(Context& c, const RouterLoss& l, const double* logits, const float* counts,
                   const int32_t* padding, const float* gradient, float* dlogits);

}  // namespace capstan::kernels::router_f64
