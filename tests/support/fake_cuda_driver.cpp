// A CUDA driver without a GPU, in the place of libcuda.so.1: it has the functions that cuDNN looks up before
// it builds a plan for a GPU that is described to it (deviceless compilation). Libraries of kernels "load",
// and nothing else works.
extern "C" {

// cuDNN loads the kernels that NVRTC has compiled, and sets their attributes.
int cuLibraryLoadData(void** library, const void*, void*, void**, unsigned, void*, void**, unsigned) {
  static int object;
  *library = &object;
  return 0;
}
int cuLibraryGetKernel(void** kernel, void*, const char*) {
  static int object;
  *kernel = &object;
  return 0;
}
int cuLibraryUnload(void*) {
  return 0;
}
int cuKernelSetAttribute(int, int, void*, int) {
  return 0;
}
int cuKernelGetAttribute(int* value, int, void*, int) {
  *value = 0;
  return 0;
}
int cuGetErrorString(int, const char** text) {
  *text = "no GPU";
  return 0;
}
int cuGetErrorName(int, const char** text) {
  *text = "CUDA_ERROR_STUB_LIBRARY";
  return 0;
}

#define CAPSTAN_NO_GPU(name) \
  int name() {               \
    return 34;               \
  }
// CUDA_ERROR_NO_DEVICE, which CUDA's runtime understands.
int cuInit(unsigned) {
  return 100;
}
CAPSTAN_NO_GPU(cuCtxGetCurrent)
CAPSTAN_NO_GPU(cuCtxGetDevice)
CAPSTAN_NO_GPU(cuCtxGetLimit)
CAPSTAN_NO_GPU(cuCtxPopCurrent)
CAPSTAN_NO_GPU(cuCtxPushCurrent)
CAPSTAN_NO_GPU(cuDeviceGet)
CAPSTAN_NO_GPU(cuDeviceGetAttribute)
CAPSTAN_NO_GPU(cuDeviceGetCount)
CAPSTAN_NO_GPU(cuDevicePrimaryCtxRelease)
CAPSTAN_NO_GPU(cuDevicePrimaryCtxReset)
CAPSTAN_NO_GPU(cuDevicePrimaryCtxRetain)
CAPSTAN_NO_GPU(cuDriverGetVersion)
CAPSTAN_NO_GPU(cuFuncGetAttribute)
CAPSTAN_NO_GPU(cuFuncSetAttribute)
CAPSTAN_NO_GPU(cuLaunchCooperativeKernel)
CAPSTAN_NO_GPU(cuLaunchKernel)
CAPSTAN_NO_GPU(cuLaunchKernelEx)
CAPSTAN_NO_GPU(cuLibraryLoadFromFile)
CAPSTAN_NO_GPU(cuLinkAddData)
CAPSTAN_NO_GPU(cuLinkAddData_v2)
CAPSTAN_NO_GPU(cuLinkAddFile_v2)
CAPSTAN_NO_GPU(cuLinkComplete)
CAPSTAN_NO_GPU(cuLinkCreate)
CAPSTAN_NO_GPU(cuLinkCreate_v2)
CAPSTAN_NO_GPU(cuLinkDestroy)
CAPSTAN_NO_GPU(cuMemcpyDtoH_v2)
CAPSTAN_NO_GPU(cuModuleGetFunction)
CAPSTAN_NO_GPU(cuModuleGetGlobal_v2)
CAPSTAN_NO_GPU(cuModuleLoadData)
CAPSTAN_NO_GPU(cuModuleLoadDataEx)
CAPSTAN_NO_GPU(cuModuleLoadFatBinary)
CAPSTAN_NO_GPU(cuModuleUnload)
CAPSTAN_NO_GPU(cuOccupancyMaxActiveBlocksPerMultiprocessor)
CAPSTAN_NO_GPU(cuOccupancyMaxPotentialClusterSize)
CAPSTAN_NO_GPU(cuStreamGetCtx)
CAPSTAN_NO_GPU(cuStreamSynchronize)
CAPSTAN_NO_GPU(cuTensorMapEncodeTiled)

}  // extern "C"
