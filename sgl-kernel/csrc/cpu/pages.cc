// Bindings of storing rows in pages, and of copying pages.
#include "dcprt/pages.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include "checks.h"

namespace {

using namespace dcprt::binding;
using tvm::ffi::Array;
using tvm::ffi::Tensor;
using tvm::ffi::TensorView;

// pool: [pages, page size, heads, dim]; rows: [tokens, heads, dim], the elements of a head dense.
void Store(TensorView rows, TensorView tokens, TensorView slots, TensorView pool) {
  Check(rows.ndim() == 3 && pool.ndim() == 4 && pool.IsContiguous(), "rows are [tokens, heads, dim], pools of pages.");
  Check(TypeOf(rows) == TypeOf(pool), "rows and pool differ in type.");
  Check(rows.size(1) == pool.size(2) && rows.size(2) == pool.size(3), "rows and pool differ in shape.");
  Check(rows.size(2) < 2 || rows.stride(2) == 1, "the elements of a head must be dense.");
  CheckStores(tokens, slots, rows.size(0), pool);
  const size_t size = dcprt::SizeOf(TypeOf(rows));
  dcprt::StoreRows(Data(rows), static_cast<size_t>(rows.stride(0)) * size, Size(rows, 2) * size,
                   static_cast<size_t>(rows.stride(1)) * size, Size(rows, 1), Ints(tokens, "tokens"), Ints(slots, "slots"),
                   static_cast<size_t>(tokens.numel()), Data(pool));
}

// Slots [0, count) of a page to another one, in every pool [pages, page size, ...].
void Copy(Array<Tensor> pools, int64_t from, int64_t to, int64_t count) {
  for (const Tensor& tensor : pools) {
    const TensorView pool = tensor;
    Check(pool.ndim() >= 2 && pool.IsContiguous(), "pools are [pages, page size, ...], and contiguous.");
    Check(pool.size(1) > 0, "pages have no slots.");
    Check(from >= 0 && to >= 0 && from < pool.size(0) && to < pool.size(0), "a page lies outside of a pool.");
    Check(from != to && count >= 0 && count <= pool.size(1), "slots of one page go to another page.");
    TypeOf(pool);
  }
  for (const Tensor& tensor : pools) {
    const TensorView pool = tensor;
    const size_t page = static_cast<size_t>(pool.numel() / pool.size(0)) * dcprt::SizeOf(TypeOf(pool));
    const size_t bytes = page / Size(pool, 1) * static_cast<size_t>(count);
    dcprt::CopyPage(Data(pool), page, static_cast<size_t>(from), static_cast<size_t>(to), bytes);
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kv_store, Store);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kv_copy, Copy);
