// A stress run of csrc/aio for the sanitizers: stress BACKEND FILE. Exit status 0, or 1 after a line on stderr.

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <thread>
#include <vector>

extern "C" {
void* ds_aio_new(int backend, int queue_depth, int64_t block_bytes, int threads, int* error);
int ds_aio_backend(void* engine);
int64_t ds_aio_submit(void* engine, int write, int fd_direct, int fd_plain, int64_t offset, void* data, int64_t bytes);
int ds_aio_wait(void* engine, int64_t ticket);
int ds_aio_done(void* engine, int64_t ticket);
void ds_aio_free(void* engine);
}

#define CHECK(condition)                                                          \
    do {                                                                          \
        if (!(condition)) {                                                       \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);       \
            _exit(1);                                                             \
        }                                                                         \
    } while (0)

namespace {

constexpr int64_t kRegion = 1 << 20;
constexpr int kThreads = 4, kRounds = 10;
int direct_fd, plain_fd;

struct Range {
    char *memory, *data;
    int64_t offset, bytes, ticket;
};

// One thread's region of the file: ranges of any size and alignment, side by side, waited for in another order.
void worker(void* engine, int which) {
    std::mt19937_64 random(which + 1);
    for (int round = 0; round < kRounds; ++round) {
        std::vector<Range> ranges;
        for (int64_t at = which * kRegion; at < (which + 1) * kRegion - 200000;) {
            const int64_t bytes = random() % 3 ? random() % 60000 : (random() % 12) * 4096;
            const int64_t shift = random() % 2 ? 0 : random() % 4096;
            char* memory = static_cast<char*>(aligned_alloc(4096, (bytes + 3 * 4096) / 4096 * 4096));
            at = random() % 2 ? (at + 4095) / 4096 * 4096 : at;
            char* data = memory + (random() % 2 ? at % 4096 : shift);
            for (int64_t i = 0; i < bytes; ++i) data[i] = static_cast<char>(random());
            ranges.push_back({memory, data, at, bytes, ds_aio_submit(engine, 1, direct_fd, plain_fd, at, data, bytes)});
            CHECK(ranges.back().ticket > 0);
            at += bytes;
        }
        std::shuffle(ranges.begin(), ranges.end(), random);
        for (Range& range : ranges) CHECK(ds_aio_wait(engine, range.ticket) == 0);
        CHECK(ds_aio_wait(engine, ranges[0].ticket) == -EINVAL);
        for (Range& range : ranges) {
            char* back = static_cast<char*>(aligned_alloc(4096, (range.bytes + 2 * 4096) / 4096 * 4096));
            char* data = back + (range.offset % 4096 && random() % 2 ? range.offset % 4096 : 0);
            const int64_t ticket = ds_aio_submit(engine, 0, direct_fd, plain_fd, range.offset, data, range.bytes);
            while (random() % 2 && ds_aio_done(engine, ticket) == 0) std::this_thread::yield();
            CHECK(ds_aio_wait(engine, ticket) == 0);
            CHECK(memcmp(data, range.data, range.bytes) == 0);
            free(back);
            free(range.memory);
        }
    }
}

}  // namespace

int main(int count, char** arguments) {
    CHECK(count == 3);
    const int backend = atoi(arguments[1]);
    plain_fd = open(arguments[2], O_RDWR | O_CREAT, 0600);
    direct_fd = open(arguments[2], O_RDWR | O_DIRECT);
    CHECK(plain_fd >= 0);
    int error = 0;
    void* engine = ds_aio_new(backend, 8, 16384, 2, &error);
    if (engine == nullptr) {
        fprintf(stderr, "backend %d: %s\n", backend, strerror(-error));
        return 77;
    }
    CHECK(ds_aio_backend(engine) == backend);
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) threads.emplace_back(worker, engine, i);
    for (std::thread& thread : threads) thread.join();

    const int64_t bytes = 4 << 20;
    char* data = static_cast<char*>(aligned_alloc(4096, bytes));
    memset(data, 7, bytes);
    CHECK(ds_aio_submit(engine, 1, direct_fd, plain_fd, -1, data, 10) == -EINVAL);
    CHECK(ds_aio_wait(engine, ds_aio_submit(engine, 0, direct_fd, plain_fd, 0, nullptr, 0)) == 0);
    const int64_t short_read = ds_aio_submit(engine, 0, direct_fd, plain_fd, (kThreads + 1) * kRegion, data, bytes);
    CHECK(ds_aio_wait(engine, short_read) == -ENODATA);
    const int closed = dup(plain_fd);
    close(closed);
    CHECK(ds_aio_wait(engine, ds_aio_submit(engine, 1, closed, closed, 0, data, bytes)) == -EBADF);

    // freed with a reader waiting and writes under way: both end
    const int64_t waited = ds_aio_submit(engine, 1, direct_fd, plain_fd, 0, data, bytes / 2);
    const int64_t left = ds_aio_submit(engine, 1, direct_fd, plain_fd, bytes / 2, data + bytes / 2, bytes / 2 - 13);
    CHECK(left > 0);
    std::thread waiter([&] { CHECK(ds_aio_wait(engine, waited) == 0); });
    while (ds_aio_done(engine, waited) != -EINVAL) std::this_thread::yield();  // until the waiter has it
    ds_aio_free(engine);
    waiter.join();
    char* back = static_cast<char*>(malloc(bytes));
    CHECK(pread(plain_fd, back, bytes, 0) >= bytes - 13);
    CHECK(memcmp(back, data, bytes - 13) == 0);
    free(back);
    free(data);
    return 0;
}
