// The linear layers of a layer of the model and their sizes, from which parameters, operations, memory and
// times follow.
#pragma once

#include <boost/container/static_vector.hpp>

#include "planner/run_shape.hpp"

namespace capstan::planner {

using LinearLayers = boost::container::static_vector<LinearLayer, 8>;

// In the order of the forward pass; the projections of queries, keys and values are one layer.
LinearLayers attention_layers(const RunShape& shape);
// Of the dense MLP, or of the shared experts: none where there are none.
LinearLayers mlp_layers(const RunShape& shape, bool expert_layer);
// Those two: the layers that each token passes.
LinearLayers dense_layers(const RunShape& shape, bool expert_layer);
// Of one routed expert.
LinearLayers routed_layers(const RunShape& shape);

double weights_of(const LinearLayers& layers);

}  // namespace capstan::planner
