#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "base/job_ranks.h"
#include "ddp/reducer_options.h"
#include "ddp/shared_state.h"

namespace pycomm {

/// The first failure of a reducer's backward passes. It stays until forget(): gradients differ between ranks from then on.
class PassFailure {
 public:
  /// `doing`: a clause that ends "while …". False if there has been a failure already: nothing is recorded.
  [[nodiscard]] bool record(const std::string& doing, const std::exception& error);
  /// Adds a sentence about the cause.
  void explain(const std::string& why);
  void forget() noexcept;

  [[nodiscard]] bool any() const noexcept {
    return !text_.empty();
  }
  /// Throws if any().
  void raise(int rank) const;

 private:
  std::string text_;
};

/// Throws: these parameters got no gradient in the last pass, so their buckets were never reduced.
[[noreturn]] void raiseMissing(int rank, const std::vector<std::string>& names);
/// Throws: all gradients had come, and an error ended the backward pass before its averages were written.
[[noreturn]] void raiseCutOff(int rank);

/// Throws: a parameter's second gradient in one pass.
[[noreturn]] void raiseSecondGradient(const std::string& name, bool static_graph);
/// Throws: a parameter of two wrappers, in one pass that goes through both.
[[noreturn]] void raiseReducedTwice(const std::string& name);
[[noreturn]] void raiseLeftNested();
/// `names`: without a gradient in the call in which a checkpoint repeated forward().
[[noreturn]] void raiseRepeated(const std::vector<std::string>& names);
/// Throws: likewise, in the first pass of a static graph, of which no gradient is ready until a node behind its outputs has run.
[[noreturn]] void raiseRepeatedStatic();
/// Throws: the wrapper itself is in a reentrant checkpoint, and the loss uses this parameter beside it.
[[noreturn]] void raiseAroundNested(const std::string& name);
/// Throws: a parameter of a static graph, `trained` before, was frozen or unfrozen.
[[noreturn]] void raiseFrozen(const std::string& name, bool trained);
/// Throws: a parameter has another dtype or device than its buckets.
[[noreturn]] void raiseConverted(const std::string& name, const std::string& before, const std::string& now);

/// The first line of an exception's text, without torch's C++ backtrace.
[[nodiscard]] std::string firstLine(const std::exception& error);

/// "'a', 'b' and 3 more parameters": the first ten names.
[[nodiscard]] std::string listed(const std::vector<std::string>& names);

/// requires_grad of all parameters.
[[nodiscard]] std::vector<bool> readTrained(const std::vector<ReducedParam>& params);

/// After a mismatch: which part of SharedValues differs between ranks, by a store of the group.
///
/// The mismatch itself has only two tags of a bucket, which name nothing. A rank that freezes or unfreezes a parameter publishes its set
/// at once, and any other part only once it has failed. So a rank whose set never changes, and that never fails, writes nothing.
///
/// A value: a copy asks for the same ranks. Not thread-safe.
class StateReports {
 public:
  /// `store`: shared by the ranks and by nothing else; null: nothing is published or compared. `trained`: the same on all ranks.
  StateReports(c10::intrusive_ptr<c10d::Store> store, int rank, JobRanks job, std::vector<bool> trained);

  /// Writes this rank's set to the store. Throws the store's errors.
  void publishTrained(const std::vector<bool>& trained);
  /// The ranks are others from now on, and share no store.
  void changeRanks(int rank, JobRanks job);
  /// They share this one, and have not compared their sets: publishes this rank's. Throws the store's errors.
  void share(c10::intrusive_ptr<c10d::Store> store, const std::vector<bool>& trained);

  /// A sentence about the first parameter that is trained here and frozen on another rank, or the reverse. Nothing if no difference is
  /// known, or if the store cannot be read.
  [[nodiscard]] std::optional<std::string> trainedDifference(
      const std::vector<bool>& trained,
      const std::vector<ReducedParam>& params,
      int world_size) const;
  /// The same about parts(), which this publishes. `failure`: how many there were before, the same on all ranks. Waits for the other ranks
  /// until `timeout`, for all of them at once: each has failed, too, or soon will.
  [[nodiscard]] std::optional<std::string> partsDifference(
      const SharedValues::Parts& parts,
      int64_t failure,
      int world_size,
      std::chrono::milliseconds timeout) const;

 private:
  [[nodiscard]] std::optional<std::string> differenceTo(
      int rank,
      const SharedValues::Parts& parts,
      const std::string& text) const;

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  JobRanks job_;
  std::vector<bool> at_first_; ///< the same on all ranks, if they have compared them
};

} // namespace pycomm
