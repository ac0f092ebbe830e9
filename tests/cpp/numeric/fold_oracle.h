#pragma once

#include <cstdint>
#include <vector>

#include "oracle.h"

namespace pycomm::oracle {

using Bytes = std::vector<unsigned char>;

template <class T>
void foldIntegers(ReduceOp op, const std::vector<const unsigned char*>& at, unsigned char* out) {
  T acc = readAs<T>(at[0]);
  for (size_t k = 1; k < at.size(); ++k) {
    acc = combineIntegers(op, acc, readAs<T>(at[k]));
  }
  writeAs(out, acc);
}

template <class T, class Write>
void foldComplex(
    ReduceOp op,
    const std::vector<const unsigned char*>& at,
    int64_t divisor,
    unsigned char* out,
    Write write) {
  T re = readAs<T>(at[0]);
  T im = readAs<T>(at[0] + sizeof(T));
  for (size_t k = 1; k < at.size(); ++k) {
    const T c = readAs<T>(at[k]);
    const T d = readAs<T>(at[k] + sizeof(T));
    if (op == ReduceOp::Product) {
      const T new_re = add(multiply(re, c), -multiply(im, d));
      im = add(multiply(re, d), multiply(im, c));
      re = new_re;
    } else {
      re = add(re, c);
      im = add(im, d);
    }
  }
  if (divisor != 1) {
    re = quotient(re, static_cast<T>(divisor));
    im = quotient(im, static_cast<T>(divisor));
  }
  write(out, re);
  write(out + sizeof(T), im);
}

/// One element: `at` points to it in every source.
inline void foldElement(
    DType dtype,
    ReduceOp op,
    const std::vector<const unsigned char*>& at,
    int64_t divisor,
    unsigned char* out) {
  const auto write_float = [](void* to, float value) { writeFloat(DType::Float32, to, value); };
  switch (dtype) {
    case DType::UInt8:
      return foldIntegers<uint8_t>(op, at, out);
    case DType::Int8:
      return foldIntegers<int8_t>(op, at, out);
    case DType::UInt16:
      return foldIntegers<uint16_t>(op, at, out);
    case DType::Int16:
      return foldIntegers<int16_t>(op, at, out);
    case DType::UInt32:
      return foldIntegers<uint32_t>(op, at, out);
    case DType::Int32:
      return foldIntegers<int32_t>(op, at, out);
    case DType::UInt64:
      return foldIntegers<uint64_t>(op, at, out);
    case DType::Int64:
      return foldIntegers<int64_t>(op, at, out);
    case DType::Bool: {
      bool acc = *at[0] != 0;
      for (size_t k = 1; k < at.size(); ++k) {
        acc = combineBools(op, acc, *at[k] != 0);
      }
      *out = acc ? 1 : 0;
      return;
    }
    case DType::Float16:
    case DType::BFloat16:
    case DType::Float8E4M3:
    case DType::Float8E5M2:
    case DType::Float32: {
      float acc = readFloat(dtype, at[0]);
      for (size_t k = 1; k < at.size(); ++k) {
        acc = combineFloats(op, acc, readFloat(dtype, at[k]));
      }
      return writeFloat(dtype, out, divisor == 1 ? acc : quotient(acc, static_cast<float>(divisor)));
    }
    case DType::Float64: {
      double acc = readAs<double>(at[0]);
      for (size_t k = 1; k < at.size(); ++k) {
        acc = combineFloats(op, acc, readAs<double>(at[k]));
      }
      return writeDouble(out, divisor == 1 ? acc : quotient(acc, static_cast<double>(divisor)));
    }
    case DType::Complex64:
      return foldComplex<float>(op, at, divisor, out, write_float);
    case DType::Complex128:
      return foldComplex<double>(op, at, divisor, out, writeDouble);
  }
}

inline Bytes fold(DType dtype, ReduceOp op, const std::vector<const Bytes*>& sources, int64_t divisor = 1) {
  Bytes out(sources[0]->size());
  std::vector<const unsigned char*> at(sources.size());
  for (size_t offset = 0; offset < out.size(); offset += elementSize(dtype)) {
    for (size_t k = 0; k < sources.size(); ++k) {
      at[k] = sources[k]->data() + offset;
    }
    foldElement(dtype, op, at, divisor, out.data() + offset);
  }
  return out;
}

} // namespace pycomm::oracle
