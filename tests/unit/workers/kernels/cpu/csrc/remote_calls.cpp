// Calls functions of a shared library for another process, which need not be of the same kind of machine: the process
// that calls sends addresses as they are, and its memory is fetched page by page when the called function touches it.
//
//   in:   name length, integers, numbers, whether a float returns (int32 each); name; integers (int64); numbers (8 bytes)
//   out:  'F' address            this page is needed; the answer is a number of pages (int32, 0: there is none) and they
//         'C' address            the page lies where this process has memory of its own
//         'D' address size ...   bytes that the call has changed
//         'R' result             the call has returned: the integer, or the bits of the float
//         'N' 0                  there is no such function
//
// Integers and pointers go in order through general registers and then the stack, numbers through vector registers, which
// is how 64-bit ARM's procedure call standard passes any list of up to 24 and 8 of them.
#include <dlfcn.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr long kPage = 4096;
constexpr long kSlots = 1 << 18;  // of the table of fetched pages: a power of 2
constexpr int kInts = 24, kNumbers = 8;

struct Page {
  char *address;   // null: the slot is free
  char *original;  // its content when it was fetched
};
Page pages[kSlots];
Page *fetched[kSlots];  // the slots in use, in order
long num_fetched = 0;
std::atomic_flag busy = ATOMIC_FLAG_INIT;

void receive(void *to, size_t size) {
  for (char *at = static_cast<char *>(to); size > 0;) {
    const ssize_t count = read(0, at, size);
    if (count <= 0) _exit(0);
    at += count, size -= count;
  }
}

void send(const void *from, size_t size) {
  for (const char *at = static_cast<const char *>(from); size > 0;) {
    const ssize_t count = write(1, at, size);
    if (count <= 0) _exit(1);
    at += count, size -= count;
  }
}

void send(char tag, const void *address) {
  send(&tag, 1);
  send(&address, sizeof address);
}

Page &slot_of(const char *address) {
  long slot = reinterpret_cast<uintptr_t>(address) / kPage * 0x9e3779b97f4a7c15u % kSlots;
  while (pages[slot].address && pages[slot].address != address) slot = (slot + 1) % kSlots;
  return pages[slot];
}

// Another thread may touch the pages meanwhile, so they are moved to their place when their content is there.
void put(char *address, int count) {
  const int rights = PROT_READ | PROT_WRITE, kind = MAP_PRIVATE | MAP_ANONYMOUS;
  const long size = count * kPage;
  char *both = static_cast<char *>(mmap(nullptr, 2 * size, rights, kind, -1, 0));
  receive(both, size);
  memcpy(both + size, both, size);
  void *free = mmap(address, size, PROT_NONE, kind, -1, 0);
  if (free != address) {
    send('C', address);
    _exit(1);
  }
  mremap(both, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, address);
  for (long at = 0; at < size; at += kPage) {
    Page &slot = slot_of(address + at);
    slot = {address + at, both + size + at};
    fetched[num_fetched++] = &slot;
  }
}

void fetch(int, siginfo_t *info, void *) {
  char *address = reinterpret_cast<char *>(reinterpret_cast<uintptr_t>(info->si_addr) & ~(kPage - 1));
  while (busy.test_and_set(std::memory_order_acquire)) sched_yield();
  if (!slot_of(address).address) {
    send('F', address);
    int32_t count;
    receive(&count, sizeof count);
    if (count == 0) signal(SIGSEGV, SIG_DFL);  // the access is repeated, and ends this process
    if (count) put(address, count);
  }
  busy.clear(std::memory_order_release);
}

void return_pages() {
  for (; num_fetched > 0; num_fetched--) {
    Page &page = *fetched[num_fetched - 1];
    for (long at = 0; at < kPage;) {
      if (at % 64 == 0 && memcmp(page.address + at, page.original + at, 64) == 0) {
        at += 64;
        continue;
      }
      if (page.address[at] == page.original[at]) {
        at++;
        continue;
      }
      int32_t size = 0;
      while (at + size < kPage && page.address[at + size] != page.original[at + size]) size++;
      send('D', page.address + at);
      send(&size, sizeof size);
      send(page.address + at, size);
      at += size;
    }
    munmap(page.address, kPage);
    munmap(page.original, kPage);
    page = {};
  }
}

template <class Result>
Result call(void *function, const int64_t *i, const double *d) {
  using L = int64_t;
  using D = double;
  using Function = Result (*)(L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, D, D, D, D, D, D, D, D);
  return reinterpret_cast<Function>(function)(
      i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8], i[9], i[10], i[11], i[12], i[13], i[14], i[15], i[16], i[17],
      i[18], i[19], i[20], i[21], i[22], i[23], d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7]);
}

}  // namespace

// Takes the place of the C library's, which clears by cache line (DC ZVA): in QEMU 7.2 such an instruction is not repeated
// after the page that it touches has been fetched.
extern "C" void *memset(void *to, int value, size_t size) {
  for (volatile char *at = static_cast<char *>(to), *end = at + size; at < end; at++) *at = static_cast<char>(value);
  return to;
}

int main(int, char **arguments) {
  void *library = dlopen(arguments[1], RTLD_NOW);
  if (!library) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  struct sigaction action = {};
  action.sa_sigaction = fetch;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);
  for (;;) {
    int32_t head[4];
    receive(head, sizeof head);
    char name[256] = {};
    int64_t integers[kInts] = {};
    double numbers[kNumbers] = {};
    if (head[0] >= 256 || head[1] > kInts || head[2] > kNumbers) return 1;
    receive(name, head[0]);
    receive(integers, head[1] * sizeof *integers);
    receive(numbers, head[2] * sizeof *numbers);
    void *function = dlsym(library, name);
    if (!function) function = dlsym(RTLD_DEFAULT, name);  // OpenMP's
    int64_t result = 0;
    if (function && head[3]) {
      const float number = call<float>(function, integers, numbers);
      memcpy(&result, &number, sizeof number);
    } else if (function) {
      result = call<int64_t>(function, integers, numbers);
    }
    return_pages();
    send(function ? 'R' : 'N', reinterpret_cast<void *>(result));
  }
}
