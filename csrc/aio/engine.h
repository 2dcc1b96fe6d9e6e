// Asynchronous file IO: what the engine, its kernel queues and its threads share.
//
// A transfer (one ticket) is cut into pieces of at most block_bytes. Pieces on the O_DIRECT descriptor are handed to a kernel
// queue; pieces that need the page cache, and whatever a kernel queue does not finish, are done by threads with blocking
// calls. All special cases (short counts, end of file, refused O_DIRECT) are thereby in one place: transfer() in threads.cpp.

#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

namespace ds::aio {

// Offset, address and length of an O_DIRECT transfer are multiples of this: enough for every disk there is.
constexpr int64_t kAlign = 4096;

enum Backend { kAuto = 0, kUring = 1, kLibaio = 2, kThreads = 3 };

struct Ticket {
    int64_t left = 0;  // bytes that are not accounted for yet
    int error = 0;     // first failure, -errno
    std::condition_variable finished;
};

// A range of a transfer; what is left of it.
struct Piece {
    Ticket* ticket;
    bool write;
    int fd;     // the O_DIRECT descriptor, or the same as plain
    int plain;  // the descriptor through the page cache
    char* data;
    int64_t offset, length;
    int64_t size;  // length at first: what the ticket is told
    iovec vector;  // for a kernel that reads it only when it gets to the piece

    bool direct() const { return fd != plain; }
    bool aligned() const { return (offset | length | static_cast<int64_t>(reinterpret_cast<uintptr_t>(data))) % kAlign == 0; }
    void advance(int64_t bytes) {
        data += bytes;
        offset += bytes;
        length -= bytes;
    }
    Piece cut(int64_t limit) {
        Piece head = *this;
        head.length = head.size = length < limit ? length : limit;
        advance(head.length);
        return head;
    }
};

struct Result {
    Piece* piece;
    int64_t status;  // bytes, or -errno
};

// A queue in the kernel; used by the service thread alone. Completions make the wake descriptor readable.
class Queue {
   public:
    virtual ~Queue() = default;
    // Hands pieces to the kernel; those that it does not take are appended to refused.
    virtual void send(const std::vector<Piece*>& pieces, std::vector<Piece*>& refused) = 0;
    virtual void reap(std::vector<Result>& results) = 0;
};

// Null, and error set to -errno, where the kernel has no such thing or does not let this process use it.
std::unique_ptr<Queue> make_uring(int depth, int wake, int* error);
std::unique_ptr<Queue> make_libaio(int depth, int wake, int* error);

// Does the whole piece with blocking calls; 0 or -errno.
int transfer(Piece& piece);

// Starts a thread that leaves signals to the program's own threads; throws std::system_error where it cannot.
template <class Body>
std::thread quiet_thread(Body body);

class Engine;

class Pool {
   public:
    Pool(Engine& engine, int limit) : engine_(engine), limit_(limit) {}
    ~Pool();
    void push(const std::vector<Piece*>& pieces);

   private:
    void work();
    bool grow();

    Engine& engine_;
    const size_t limit_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Piece*> jobs_;
    std::vector<std::thread> threads_;
    size_t idle_ = 0;
    bool stop_ = false;
};

// Pieces of one kind: not cut yet, and how many are being done.
struct Lane {
    std::deque<Piece> waiting;
    int flying = 0, limit = 1;
};

class Engine {
   public:
    // Throws std::system_error with what the system refused.
    Engine(int backend, int depth, int64_t block_bytes, int threads);
    ~Engine();  // waits for everything in flight, and for threads inside wait()

    int backend() const { return backend_; }
    int64_t submit(Piece whole, int fd_direct);
    int wait(int64_t id);
    int done(int64_t id);
    bool foreign() const;  // in a forked child, which has none of our threads

    void finish(Piece* piece, int error);
    void wake();

   private:
    std::unique_ptr<Queue> open_queue(int wanted, int depth);
    void serve();
    void take(Lane& lane, std::vector<Piece*>& out);
    void account(Ticket& ticket, int64_t bytes);

    const int pid_;
    const int64_t block_bytes_;
    int backend_ = kThreads;
    int wake_ = -1;
    std::unique_ptr<Queue> queue_;  // null: threads do everything
    std::unique_ptr<Pool> pool_;
    std::thread service_;

    std::mutex mutex_;  // everything below
    Lane direct_, plain_;
    std::unordered_map<int64_t, std::unique_ptr<Ticket>> tickets_;
    std::condition_variable left_;
    int64_t next_ = 1;
    int waiting_ = 0;
    bool closing_ = false;
};

}  // namespace ds::aio

#include <pthread.h>
#include <signal.h>

template <class Body>
std::thread ds::aio::quiet_thread(Body body) {
    sigset_t all, before;
    sigfillset(&all);
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    struct Restore {
        sigset_t* set;
        ~Restore() { pthread_sigmask(SIG_SETMASK, set, nullptr); }
    } restore{&before};
    return std::thread(body);
}
