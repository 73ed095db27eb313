#include "kernels/table.hpp"
