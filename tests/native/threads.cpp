// The part of GCC's OpenMP that the kernels use, on std::thread: ThreadSanitizer sees every start, barrier and end.
//
// It takes the place of libgomp in the build for ThreadSanitizer alone. libgomp waits on futexes, which ThreadSanitizer
// takes for no synchronization at all. The functions are those that GCC 12 and later call for `parallel`, `for` and
// barriers; a static schedule needs none. A pragma of another kind does not link.
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

namespace {

struct Loop {
    long next, end, step, chunk;
};

// The threads of one parallel region.
struct Team {
    unsigned threads;
    std::mutex mutex;
    std::condition_variable all_here;
    unsigned waiting = 0;
    long barriers = 0;
    std::map<int, Loop> loops;  // by number: each thread meets them in the same order
};

struct Member {
    Team* team = nullptr;
    unsigned number = 0;
    int loop = 0;
};

thread_local Member self;

void run(Team& team, unsigned number, void (*body)(void*), void* data) {
    const Member before = self;
    self = {&team, number, 0};
    body(data);
    self = before;
}

}  // namespace

extern "C" {

void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned) {
    Team team{threads ? threads : 1};
    std::vector<std::thread> others;
    for (unsigned i = 1; i < team.threads; ++i) others.emplace_back(run, std::ref(team), i, body, data);
    run(team, 0, body, data);
    for (std::thread& other : others) other.join();
}

void GOMP_barrier() {
    Team& team = *self.team;
    std::unique_lock<std::mutex> lock(team.mutex);
    const long now = team.barriers;
    if (++team.waiting == team.threads) {
        team.waiting = 0;
        ++team.barriers;
        team.all_here.notify_all();
    }
    team.all_here.wait(lock, [&] { return team.barriers != now; });
}

bool GOMP_loop_nonmonotonic_dynamic_next(long* first, long* last) {
    const std::lock_guard<std::mutex> lock(self.team->mutex);
    Loop& loop = self.team->loops[self.loop];
    if (loop.next >= loop.end) return false;
    *first = loop.next;
    loop.next += loop.chunk * loop.step;
    *last = loop.next < loop.end ? loop.next : loop.end;
    return true;
}

bool GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long step, long chunk, long* first, long* last) {
    {
        const std::lock_guard<std::mutex> lock(self.team->mutex);
        self.team->loops.emplace(self.loop, Loop{start, end, step, chunk});
    }
    return GOMP_loop_nonmonotonic_dynamic_next(first, last);
}

void GOMP_loop_end_nowait() { ++self.loop; }

int omp_get_num_threads() { return self.team ? static_cast<int>(self.team->threads) : 1; }
int omp_get_thread_num() { return static_cast<int>(self.number); }

}  // extern "C"
