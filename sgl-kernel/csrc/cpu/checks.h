// What the bindings check, and how they see tensors.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/optional.h>

#include <stdexcept>

#include "dcprt/isa.h"
#include "dcprt/linear_types.h"
#include "dcprt/matrix_code.h"

namespace dcprt::binding {

inline void Check(bool ok, const char* what) {
  if (!ok) TVM_FFI_THROW(ValueError) << what;
}

template <class T = char>
T* Data(const tvm::ffi::TensorView& x) {
  return reinterpret_cast<T*>(static_cast<char*>(x.data_ptr()) + x.byte_offset());
}

inline size_t Size(const tvm::ffi::TensorView& x, int dim) { return static_cast<size_t>(x.size(dim)); }

inline FloatType TypeOf(const tvm::ffi::TensorView& x) {
  const DLDataType type = x.dtype();
  if (x.device().device_type != kDLCPU) TVM_FFI_THROW(ValueError) << "tensors must be on the CPU.";
  const bool is_float = type.code == kDLFloat && type.bits == 32;
  if (type.lanes != 1 || !(is_float || type.code == kDLBfloat)) {
    TVM_FFI_THROW(ValueError) << "kernels are for float32 and bfloat16.";
  }
  return is_float ? FloatType::kFloat32 : FloatType::kBFloat16;
}

inline void CheckDense(const tvm::ffi::TensorView& x, int dims, FloatType type, const char* name) {
  if (x.ndim() != dims || !x.IsContiguous() || TypeOf(x) != type) {
    TVM_FFI_THROW(ValueError) << name << " is not contiguous, of " << dims << " dimensions and of type "
                              << (type == FloatType::kFloat32 ? "float32." : "bfloat16.");
  }
}

inline const int64_t* Ints(const tvm::ffi::TensorView& x, const char* name) {
  if (x.dtype().code != kDLInt || x.dtype().bits != 64 || !x.IsContiguous()) {
    TVM_FFI_THROW(ValueError) << name << " are int64 and contiguous.";
  }
  return Data<int64_t>(x);
}

inline bool IsCoded(const tvm::ffi::TensorView& data) {
  Check(data.device().device_type == kDLCPU, "tensors must be on the CPU.");
  return data.dtype().code == kDLUInt && data.dtype().bits == 8;
}

// What a matrix was coded from is bfloat16.
inline PackedMatrix CodedOf(const tvm::ffi::TensorView& data, int64_t outs, int64_t ins) {
  const auto* header = Data<const CodeHeader>(data);
  Check(reinterpret_cast<uintptr_t>(header) % 8 == 0, "a coded matrix is aligned to 8 bytes.");
  if (static_cast<size_t>(data.numel()) < sizeof(CodeHeader) || header->bytes != static_cast<size_t>(data.numel()) ||
      header->outs != static_cast<size_t>(outs) || header->ins != static_cast<size_t>(ins)) {
    TVM_FFI_THROW(ValueError) << "a coded matrix is of another size than " << outs << " outputs and " << ins << " inputs.";
  }
  return {header, FloatType::kBFloat16, header->outs, header->ins, true};
}

// `data` as a matrix with that many outputs and inputs.
inline PackedMatrix MatrixOf(const tvm::ffi::TensorView& data, int64_t outs, int64_t ins) {
  if (outs < 0 || ins < 0 || !data.IsContiguous()) TVM_FFI_THROW(ValueError) << "a packed matrix is contiguous.";
  if (IsCoded(data)) return CodedOf(data, outs, ins);
  const PackedMatrix m{Data(data), TypeOf(data), static_cast<size_t>(outs), static_cast<size_t>(ins)};
  if (static_cast<size_t>(data.numel()) != m.Panels() * m.PanelElements()) {
    TVM_FFI_THROW(ValueError) << "a packed matrix has another size than " << outs << " outputs and " << ins
                              << " inputs take.";
  }
  return m;
}

// Elements from one row of [rows, count] to the next; within a row they are dense.
inline size_t RowStride(const tvm::ffi::TensorView& x) {
  Check(x.ndim() == 2, "x, weight and out have two dimensions.");
  Check(x.size(1) < 2 || x.stride(1) == 1, "the elements of a row must be dense.");
  return static_cast<size_t>(x.size(0) < 2 ? x.size(1) : x.stride(0));
}

// What is added to the residual x [rows, hidden] first, or null.
inline const float* AddOf(const tvm::ffi::Optional<tvm::ffi::TensorView>& add, const tvm::ffi::TensorView& x) {
  if (!add.has_value()) return nullptr;
  CheckDense(add.value(), 2, FloatType::kFloat32, "add");
  Check(add.value().size(0) == x.size(0) && add.value().size(1) == x.size(1), "x and add differ in shape.");
  return Data<float>(add.value());
}

// The bias of a matrix, in its type, or null.
inline const void* BiasOf(const tvm::ffi::Optional<tvm::ffi::TensorView>& bias, const PackedMatrix& matrix) {
  if (!bias.has_value()) return nullptr;
  CheckDense(bias.value(), 1, matrix.type, "bias");
  Check(Size(bias.value(), 0) == matrix.outs, "bias is not [out].");
  return Data(bias.value());
}

// Which of `count` tokens go to which slots of pool [pages, page size, ...].
inline void CheckStores(const tvm::ffi::TensorView& tokens, const tvm::ffi::TensorView& slots, int64_t count,
                        const tvm::ffi::TensorView& pool) {
  const int64_t *from = Ints(tokens, "tokens"), *to = Ints(slots, "slots"), last = pool.size(0) * pool.size(1);
  Check(tokens.numel() == slots.numel(), "there is one slot for each token.");
  for (int64_t i = 0; i < tokens.numel(); ++i) {
    Check(from[i] >= 0 && from[i] < count, "a token lies outside of the rows.");
    Check(to[i] >= 0 && to[i] < last, "a slot lies outside of the pool.");
  }
}

// Raises for a DCPRT_KERNEL_ISA that this processor cannot run.
inline Isa ChosenIsa() {
  try {
    return CurrentIsa();
  } catch (const std::invalid_argument& error) {
    TVM_FFI_THROW(ValueError) << error.what();
  }
  __builtin_unreachable();
}

}  // namespace dcprt::binding
