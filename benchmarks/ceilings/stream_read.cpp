// The rate at which all threads together read memory that no cache holds: `stream_read GIBIBYTES` prints the best and the
// median of nine passes in GB/s. GCC's vectors, so it is compiled for the processor at hand whatever that is.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <omp.h>

typedef long long Vector __attribute__((vector_size(32)));

// One thread is timed by the processor's time that it had, so that a busy machine matters less.
double now() {
  if (omp_get_max_threads() > 1) return omp_get_wtime();
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

int main(int argc, char **argv) {
  const long page = 4096, ahead = 2048;
  const long bytes = (long)((argc > 1 ? atof(argv[1]) : 1) * (1 << 30)) / page * page;
  char *data = (char *)aligned_alloc(page, bytes);
  if (!data) return 1;
#pragma omp parallel for schedule(static)
  for (long i = 0; i < bytes; i += page) memset(data + i, 1, page);
  double rate[9];
  long long sum = 0;
  for (double &one : rate) {
    const double start = now();
#pragma omp parallel reduction(+ : sum)
    {
      const long threads = omp_get_num_threads(), number = omp_get_thread_num(), pages = bytes / page;
      const char *end = data + pages * (number + 1) / threads * page;
      Vector a = {}, b = {}, c = {}, d = {};
      for (const char *at = data + pages * number / threads * page; at < end; at += 128) {
        __builtin_prefetch(at + ahead), __builtin_prefetch(at + ahead + 64);
        a += *(const Vector *)at, b += *(const Vector *)(at + 32);
        c += *(const Vector *)(at + 64), d += *(const Vector *)(at + 96);
      }
      a += b + c + d;
      sum += a[0] + a[1] + a[2] + a[3];
    }
    one = bytes / (now() - start) / 1e9;
  }
  std::sort(rate, rate + 9);
  fprintf(stderr, "%lld\n", sum); // the sum is used, so the reads stay
  printf("{\"best\": %.2f, \"median\": %.2f}\n", rate[8], rate[4]);
}
