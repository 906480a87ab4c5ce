// Slots of recurrent state that the sequences of a step read and write (`workers/recurrent/states.py`), and how the
// work on them is divided among threads.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace recurrent {

// Sequence s has the tokens `starts[s]` to `starts[s + 1]`. It starts from the state in slot `reads[s]` and leaves its
// new state in slot `writes[s]`. Its saves are the entries `save_starts[s]` to `save_starts[s + 1]`: the state after
// its first `save_lens[v]` tokens goes to slot `save_slots[v]`, in ascending order of these lengths. Nobody reads a
// slot that is written in this step, so `writes[s]` also holds the state while the tokens are computed.
struct StateStep {
  const int32_t *starts, *reads, *writes, *save_starts, *save_lens, *save_slots;
  long seqs;
};

// The saves of one sequence, in order.
class Saves {
 public:
  Saves(const StateStep &step, long seq)
      : step_(step), next_(step.save_starts[seq]), last_(step.save_starts[seq + 1]) {}

  // Call `save(slot)` for the saves after the first `tokens` tokens.
  template <class Save>
  void after(long tokens, const Save &save) {
    for (; next_ < last_ && step_.save_lens[next_] <= tokens; next_++)
      if (step_.save_lens[next_] == tokens) save(step_.save_slots[next_]);
  }

 private:
  const StateStep &step_;
  long next_, last_;
};

constexpr long kTokensAtOnce = 64;  // tokens whose inputs are prepared together; their number does not affect results

// The parts `first` to `last` of a head of a sequence, and the state that the same thread reads next.
struct HeadTask {
  long seq, head, first, last;
  long next;  // slot * heads + head
};

// Run `work(HeadTask)` for all parts of all heads of all sequences, in parallel. Parts of a head share the preparation
// of inputs, so they are only divided if there are fewer heads than threads need. If all heads have the same work, a
// thread takes consecutive ones, whose states are next to each other in memory.
template <class Work>
inline void for_each_head(const StateStep &step, long heads, long parts, const Work &work) {
  const long each = step.seqs * heads < 2 * omp_get_max_threads() ? 1 : parts, shares = parts / each;
  const long tasks = step.seqs * heads * shares;
  const auto run = [&](long task, long next) {
    const long share = task % shares, head = task / shares % heads, seq = task / shares / heads;
    const long next_seq = next / shares / heads, next_head = next / shares % heads;
    work(HeadTask{seq, head, share * each, (share + 1) * each, step.reads[next_seq] * heads + next_head});
  };
#pragma omp parallel
  if (const long threads = omp_get_num_threads(); threads == 1 || step.starts[step.seqs] == step.seqs) {
    const long thread = omp_get_thread_num(), end = tasks * (thread + 1) / threads;
    for (long task = tasks * thread / threads; task < end; task++) run(task, std::min(task + 1, end - 1));
  } else {
#pragma omp for schedule(dynamic, 1)
    for (long task = 0; task < tasks; task++) run(task, task);
  }
}

}  // namespace recurrent
