// A CUDA device that is not there: as much of one as autograd, autocast and shape rules ask for.
//
// Tensors on it are fake; no kernel ever runs. Loaded after libtorch_cpu and before Python imports
// torch, which looks for the hooks once; `graphopt_believe` is called after that import, which brings
// the guard of the real device in a build of torch for CUDA.

#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

thread_local DeviceIndex current = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override {
    const Device before(DeviceType::CUDA, current);
    current = device.index();
    return before;
  }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  void setDevice(Device device) const override { current = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

// The order in which a recent device tries its kernels of attention.
int64_t attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const std::optional<at::Tensor>& mask, double dropout, bool causal,
                  std::optional<double> scale, bool grouped) {
  constexpr int64_t math = 0, flash = 1, efficient = 2;
  const auto width = query.sym_size(-1).maybe_as_int().value_or(0);
  const bool half = query.scalar_type() != at::kFloat;
  if (query.dim() != 4 || query.scalar_type() == at::kDouble || query.is_nested()) return math;
  if (half && !mask.has_value() && width <= 256) return flash;
  return !grouped && width % (half ? 8 : 4) == 0 ? efficient : math;
}

}  // namespace

namespace at {

// The registry knows its hooks by the name of this class.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return 91000; }
  long versionRuntimeCuDNN() const override { return 91000; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  double batchnormMinEpsilonCuDNN() const override { return 0.0; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return current; }
  int getNumGPUs() const override { return 1; }
};

C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(CUDAHooksRegistry, "CUDAHooks", c10::REGISTRY_PREFERRED,
                                       CUDAHooks)

}  // namespace at

extern "C" void graphopt_believe() {
  static const c10::impl::DeviceGuardImplRegistrar guard(DeviceType::CUDA, new Guard());
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention);
}
