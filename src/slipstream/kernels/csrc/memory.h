// Tensors without values.

#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <mutex>

// `at::empty` without the dispatcher, which takes longer than small products.
inline at::Tensor fresh(at::IntArrayRef sizes, at::ScalarType type) {
  return at::detail::empty_cpu(sizes, type);
}

// In huge pages, which are read a quarter quicker. Small ones share blocks of memory.
inline at::Tensor huge(at::IntArrayRef sizes, at::ScalarType type) {
  struct Block {
    char* data;
    int64_t size, used = 0;
    explicit Block(int64_t size) : data(static_cast<char*>(std::aligned_alloc(1 << 21, size))), size(size) {
      TORCH_CHECK(data, "no memory for packed weights");
#if defined(MADV_HUGEPAGE)
      madvise(data, size, MADV_HUGEPAGE);
#endif
    }
    ~Block() { std::free(data); }
  };
  static std::mutex one;
  static std::shared_ptr<Block> block;
  std::lock_guard<std::mutex> guard(one);
  const int64_t bytes = (c10::multiply_integers(sizes) * c10::elementSize(type) + 4095) / 4096 * 4096;
  if (!block || block->size - block->used < bytes)
    block = std::make_shared<Block>(std::max<int64_t>(bytes, 32 << 20) + (1 << 21) - 1 >> 21 << 21);
  char* data = block->data + block->used;
  block->used += bytes;
  return at::from_blob(data, sizes, [kept = block](void*) {}, at::TensorOptions().dtype(type));
}
