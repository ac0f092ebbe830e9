#pragma once

#include <exception>
#include <string>
#include <vector>

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
/// Throws: a parameter of a static graph, `trained` before, was frozen or unfrozen.
[[noreturn]] void raiseFrozen(const std::string& name, bool trained);
/// Throws: a parameter has another dtype or device than its buckets.
[[noreturn]] void raiseConverted(const std::string& name, const std::string& before, const std::string& now);

/// "'a', 'b' and 3 more parameters": the first ten names.
[[nodiscard]] std::string listed(const std::vector<std::string>& names);

} // namespace pycomm
