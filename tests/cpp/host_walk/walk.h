#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace pycomm::testing {

[[nodiscard]] uint64_t mixed(uint64_t hash, uint64_t value) noexcept;
[[nodiscard]] uint64_t mixed(uint64_t hash, const void* bytes, size_t nbytes) noexcept;

/// What a Walk walks through: programs that run at the same time, one for each rank, over memory that they share.
class Scene {
 public:
  virtual ~Scene() = default;
  /// Puts everything back to how it was at the beginning.
  virtual void reset() = 0;
  /// The program of a rank. It ends soon once Walk::draining().
  virtual void body(int rank) = 0;
  /// Of everything that a rank can see of what others did, and of what it has made of it.
  [[nodiscard]] virtual uint64_t hash() const = 0;
  /// All programs have ended.
  virtual void ended() = 0;
};

/// All orders in which the programs of a Scene can take their steps. A program is a fiber, which stops (pause) before each step that others
/// can see or that sees others. A state that was reached before, by whatever way, is not gone on from again. Nothing can be copied in the middle of a
/// program, so to try another step the programs are run again from the beginning.
///
/// The order is sequentially consistent: what one step writes, all see after it.
class Walk {
 public:
  struct Found {
    size_t states = 0;
    size_t runs = 0; ///< to the end
    std::string wrong; ///< the first thing that should not be, and the steps to it
  };

  /// `late`: this rank begins once no other can go on. -1: none.
  Walk(Scene& scene, int size, int late = -1);
  /// `most`: states. Reaching it is wrong as well.
  [[nodiscard]] Found all(size_t most);

  /// The one that runs. The rest is for programs.
  [[nodiscard]] static Walk& current() noexcept {
    return *current_;
  }
  [[nodiscard]] int rank() const noexcept {
    return running_;
  }
  /// What the program does after this happens at once, up to the next pause.
  void pause(const char* what);
  /// The program is about to load, or to store, this word: a pause, unless no other program ever stores it, or uses it. That is learned
  /// on the way; if it proves to be otherwise, the walk begins again. `passing`: the program goes over words in the order of their addresses,
  /// and once it has done so, what it found there does not matter to it. So all ways through such a pass lead to one state.
  void pauseToLoad(const void* word, const char* what, bool passing);
  void pauseToStore(const void* word, const char* what, bool passing);
  /// The program loads, or stores, this word: another may store it, or use it.
  void loads(const void* word);
  void stores(const void* word);
  /// Between two calls of what is walked through: the choice of one of so many ways to go on. `state`: of the rank, all that is not in Scene::hash().
  [[nodiscard]] int choose(int ways, uint64_t state);
  /// What the rank that runs will do depends on this and on Scene::hash(), and on nothing else that it saw in this call.
  void knowsOnly(uint64_t state) noexcept {
    now().log = state;
  }
  /// The last call did nothing: the first way is closed until another rank writes.
  void didNothing() noexcept {
    now().did_nothing = true;
  }
  /// Has read this where others write.
  void saw(uint64_t value) noexcept {
    now().log = mixed(now().log, value);
  }
  void wrote() noexcept;
  /// The same for one that polls: it looks again when another rank has written.
  void untilOthersWrite();
  /// Until wake() with the same word.
  void sleep(const void* word);
  void wake(const void* word) noexcept;
  [[nodiscard]] bool draining() const noexcept {
    return draining_;
  }
  void wrong(const std::string& what);
  [[nodiscard]] bool sleeps(int rank) const noexcept {
    return ranks_[static_cast<size_t>(rank)].asleep != nullptr;
  }

 private:
  struct Rank {
    ucontext_t context{}; ///< until it has begun
    jmp_buf at{}; ///< after that
    bool begun = false;
    std::vector<std::byte> stack;
    bool ended = false;
    bool between = false; ///< two calls
    bool did_nothing = false;
    bool news = false; ///< another rank has written since its last call began
    const void* asleep = nullptr;
    int ways = 1;
    int chosen = 0;
    uint64_t log = 0; ///< since its last call began
    const void* passing = nullptr; ///< the word in whose place it is, in a pass
    const char* what = "begins";
  };
  struct Step {
    int rank;
    int way;
  };
  /// The ranks (bits) that do something with a word.
  struct Use {
    uint64_t load = 0;
    uint64_t store = 0;
  };

  Rank& now() noexcept {
    return ranks_[static_cast<size_t>(running_)];
  }
  /// Whether this rank is not among those that were known to do it.
  [[nodiscard]] bool learn(uint64_t& ranks) noexcept;
  void pauseAt(const void* word, const char* what, bool passing);
  static void enter();
  void begin();
  void go(Step step);
  void swap();
  void enterRank() noexcept;
  void drain();
  [[nodiscard]] std::vector<Step> possible() const;
  [[nodiscard]] Found allAsFarAsKnown(size_t most);
  [[nodiscard]] uint64_t hash() const;
  [[nodiscard]] std::string told();

  static Walk* current_;
  Scene& scene_;
  std::vector<Rank> ranks_;
  jmp_buf main_{};
  const int late_;
  int running_ = 0;
  bool draining_ = false;
  std::string wrong_;
  std::unordered_map<const void*, Use> uses_;
  bool learned_ = false; ///< that a word is shared which was taken for one that is not
  std::unordered_set<uint64_t> seen_;
  std::vector<Step> path_; ///< to the state that is looked at
  size_t at_ = 0; ///< the next step of path_
};

} // namespace pycomm::testing
