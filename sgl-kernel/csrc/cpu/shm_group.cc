// Bindings of the shared-memory collectives. Handles are pointers that the Python wrapper owns.
#include "dcprt/shm_group.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/container/tuple.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <cstring>

#include "checks.h"
#include "shm_handle.h"

namespace {

using namespace dcprt::binding;
using dcprt::Call;
using dcprt::Deadline;
using dcprt::ShmArena;
using dcprt::ShmGroup;
using tvm::ffi::TensorView;

int64_t Open(int64_t fd, int64_t rank, int64_t ranks, int64_t slot_bytes) {
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    TVM_FFI_THROW(ValueError) << "rank " << rank << " is not in a group of " << ranks << ".";
  }
  if (slot_bytes < 64 * ranks || slot_bytes % 64 != 0) {
    TVM_FFI_THROW(ValueError) << "a slot of " << slot_bytes << " bytes is no multiple of 64, or less than 64 per rank.";
  }
  const size_t bytes = ShmArena::Bytes(static_cast<size_t>(ranks), static_cast<size_t>(slot_bytes));
  struct stat info {};
  if (fstat(static_cast<int>(fd), &info) != 0) {
    TVM_FFI_THROW(ValueError) << "descriptor " << fd << " is not open: " << std::strerror(errno) << ".";
  }
  if (static_cast<size_t>(info.st_size) < bytes) {
    TVM_FFI_THROW(ValueError) << "the arena has " << info.st_size << " bytes and needs " << bytes << ".";
  }
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, static_cast<int>(fd), 0);
  if (base == MAP_FAILED) TVM_FFI_THROW(RuntimeError) << "mmap of the arena: " << std::strerror(errno) << ".";
  auto* mapping = new ShmMapping{base, bytes,
                                 ShmGroup(base, static_cast<uint32_t>(rank), static_cast<uint32_t>(ranks),
                                          static_cast<size_t>(slot_bytes))};
  return reinterpret_cast<int64_t>(mapping);
}

void Close(int64_t handle) {
  auto* mapping = reinterpret_cast<ShmMapping*>(handle);
  munmap(mapping->base, mapping->bytes);
  delete mapping;
}

int64_t Bytes(const TensorView& x) { return x.numel() * ((x.dtype().bits * x.dtype().lanes + 7) / 8); }

void CheckTensors(int64_t op, int64_t root, const TensorView& x, const TensorView& out, int64_t ranks) {
  Check(x.device().device_type == kDLCPU && out.device().device_type == kDLCPU, "tensors must be on the CPU.");
  Check(x.IsContiguous() && out.IsContiguous(), "tensors must be contiguous.");
  const DLDataType a = x.dtype(), b = out.dtype();
  Check(a.code == b.code && a.bits == b.bits && a.lanes == b.lanes, "input and output differ in dtype.");
  Check(root >= 0 && root < ranks, "root is not a rank of the group.");
  const int64_t in_bytes = Bytes(x), out_bytes = Bytes(out);
  if (op == dcprt::kAllReduce || op == dcprt::kReduceScatter) {
    const bool is_float = a.code == kDLFloat && a.bits == 32;
    Check(a.lanes == 1 && (is_float || a.code == kDLBfloat), "sums are for float32 and bfloat16.");
  }
  switch (op) {
    case dcprt::kAllGather:
      return Check(out_bytes == in_bytes * ranks, "the output is not as large as the inputs of all ranks.");
    case dcprt::kReduceScatter:
      return Check(in_bytes == out_bytes * ranks, "the input is not as large as the outputs of all ranks.");
    case dcprt::kAllToAll:
      Check(x.numel() % ranks == 0, "the input does not divide by the ranks.");
      return Check(in_bytes == out_bytes, "input and output differ in size.");
    case dcprt::kBroadcast:
      Check(Data(x) == Data(out), "a broadcast works in place.");
      return Check(in_bytes == out_bytes, "input and output differ in size.");
    default:
      return Check(in_bytes == out_bytes, "input and output differ in size.");
  }
}

Call Checked(const ShmGroup& group, int64_t op, const TensorView& x, const TensorView& out, int64_t root) {
  CheckTensors(op, root, x, out, group.arena().ranks());
  const DLDataType dtype = x.dtype();
  return {static_cast<uint32_t>(op), dcprt::DtypeTag(dtype.code, dtype.bits), static_cast<uint32_t>(root),
          static_cast<uint32_t>(dtype.bits / 8u), static_cast<uint64_t>(Bytes(x))};
}

int64_t Start(int64_t handle, int64_t op, TensorView x, TensorView out, int64_t root, double timeout_s) {
  ShmGroup& group = GroupOf(handle);
  const Call call = Checked(group, op, x, out, root);
  return static_cast<int64_t>(group.Start(call, Data(x), Data(out), Deadline::After(timeout_s)));
}

int64_t Finish(int64_t handle, double timeout_s) {
  return static_cast<int64_t>(GroupOf(handle).Finish(Deadline::After(timeout_s)));
}

int64_t CallWhole(int64_t handle, int64_t op, TensorView x, TensorView out, double timeout_s) {
  ShmGroup& group = GroupOf(handle);
  const Call call = Checked(group, op, x, out, 0);
  return static_cast<int64_t>(group.Run(call, Data(x), Data(out), Deadline::After(timeout_s)));
}

// (op, status) of the last operation.
tvm::ffi::Tuple<int64_t, int64_t> Last(int64_t handle) {
  const ShmGroup& group = GroupOf(handle);
  return tvm::ffi::Tuple<int64_t, int64_t>(static_cast<int64_t>(group.call().op), static_cast<int64_t>(group.status()));
}

// (arrived, op, dtype tag, root, bytes) of a rank in the current round; zeros if it is missing.
using PeerCall = tvm::ffi::Tuple<bool, int64_t, int64_t, int64_t, int64_t>;

PeerCall Peer(int64_t handle, int64_t rank) {
  const ShmArena& arena = GroupOf(handle).arena();
  const auto peer = static_cast<uint32_t>(rank);
  Check(rank >= 0 && peer < arena.ranks(), "no such rank.");
  if (!arena.HasArrived(peer)) return PeerCall(false, 0, 0, 0, 0);
  const Call& call = arena.CallOf(peer);
  return PeerCall(true, call.op, call.dtype, call.root, static_cast<int64_t>(call.bytes));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(shm_open, Open);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(shm_close, Close);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(shm_start, Start);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(shm_finish, Finish);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(shm_call, CallWhole);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(shm_last, Last);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(shm_peer, Peer);
