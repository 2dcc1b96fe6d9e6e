// The asynchronous IO engine: tickets, one service thread that feeds the kernel and reaps, and the C interface.

#include "aio/engine.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <new>
#include <system_error>

namespace ds::aio {

namespace {

constexpr int kMaxDepth = 4096;
constexpr int kMaxThreads = 256;
constexpr int64_t kMaxBlock = int64_t{1} << 30;  // the kernel moves less than 2 GiB at a time

[[noreturn]] void fail(int code) { throw std::system_error(code, std::generic_category()); }

// What DS_AIO_BACKEND says; kAuto where it is not set.
int named_backend() {
    const char* name = getenv("DS_AIO_BACKEND");
    if (name == nullptr || *name == '\0' || strcmp(name, "auto") == 0) return kAuto;
    if (strcmp(name, "io_uring") == 0) return kUring;
    if (strcmp(name, "libaio") == 0) return kLibaio;
    if (strcmp(name, "threads") == 0) return kThreads;
    fail(EINVAL);
}

}  // namespace

Engine::Engine(int backend, int depth, int64_t block_bytes, int threads) : pid_(getpid()), block_bytes_(block_bytes) {
    if (backend < kAuto || backend > kThreads || depth < 1 || depth > kMaxDepth || threads < 1 || threads > kMaxThreads ||
        block_bytes < kAlign || block_bytes > kMaxBlock || block_bytes % kAlign != 0)
        fail(EINVAL);
    direct_.limit = depth;
    plain_.limit = threads;
    wake_ = eventfd(0, EFD_CLOEXEC);
    if (wake_ < 0) fail(errno);
    try {
        queue_ = open_queue(backend == kAuto ? named_backend() : backend, depth);
        // one thread per transfer in flight where threads are all there is
        pool_ = std::make_unique<Pool>(*this, queue_ ? threads : depth + threads);
        service_ = quiet_thread([this] { serve(); });
    } catch (...) {
        queue_.reset();
        close(wake_);
        throw;
    }
}

std::unique_ptr<Queue> Engine::open_queue(int wanted, int depth) {
    int error = 0;
    for (const int each : {kUring, kLibaio}) {
        if (wanted != kAuto && wanted != each) continue;
        auto queue = each == kUring ? make_uring(depth, wake_, &error) : make_libaio(depth, wake_, &error);
        if (queue) {
            backend_ = each;
            return queue;
        }
        if (wanted == each) fail(-error);
    }
    backend_ = kThreads;
    return nullptr;
}

Engine::~Engine() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
    }
    wake();
    service_.join();
    pool_.reset();
    queue_.reset();
    std::unique_lock<std::mutex> lock(mutex_);
    left_.wait(lock, [this] { return waiting_ == 0; });
    close(wake_);
}

bool Engine::foreign() const { return getpid() != pid_; }

void Engine::wake() {
    const uint64_t one = 1;
    // fails only when the counter is full, and then the service thread has been woken already
    while (write(wake_, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

int64_t Engine::submit(Piece whole, int fd_direct) {
    auto ticket = std::make_unique<Ticket>();
    ticket->left = whole.length;
    whole.ticket = ticket.get();
    const int64_t before = (kAlign - whole.offset % kAlign) % kAlign;
    const int64_t middle = (whole.length - before) / kAlign * kAlign;
    const bool split = fd_direct >= 0 && fd_direct != whole.plain && whole.length - before >= kAlign &&
                       reinterpret_cast<uintptr_t>(whole.data + before) % kAlign == 0;
    int64_t id;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (closing_) return -ESHUTDOWN;
        id = next_++;
        tickets_.emplace(id, std::move(ticket));
        // A block that is not whole goes through the page cache in both directions, so that the same bytes of it are never
        // under way on both descriptors; between transfers the kernel keeps the two coherent.
        if (split) {
            if (before > 0) plain_.waiting.push_back(whole.cut(before));
            direct_.waiting.push_back(whole.cut(middle));
            direct_.waiting.back().fd = fd_direct;
        }
        if (whole.length > 0) plain_.waiting.push_back(whole);
    }
    wake();
    return id;
}

int Engine::wait(int64_t id) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto found = tickets_.find(id);
    if (found == tickets_.end()) return -EINVAL;
    const std::unique_ptr<Ticket> ticket = std::move(found->second);
    tickets_.erase(found);
    ++waiting_;
    ticket->finished.wait(lock, [&] { return ticket->left == 0; });
    if (--waiting_ == 0 && closing_) left_.notify_all();
    return ticket->error;
}

int Engine::done(int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = tickets_.find(id);
    return found == tickets_.end() ? -EINVAL : found->second->left == 0;
}

// Under the lock. The ticket may be gone afterwards.
void Engine::account(Ticket& ticket, int64_t bytes) {
    ticket.left -= bytes;
    if (ticket.left == 0) ticket.finished.notify_all();
}

void Engine::finish(Piece* piece, int error) {
    std::lock_guard<std::mutex> lock(mutex_);
    --(piece->direct() ? direct_ : plain_).flying;
    if (error != 0 && piece->ticket->error == 0) piece->ticket->error = error;
    account(*piece->ticket, piece->size);
    delete piece;
}

// Under the lock: cut as many pieces as may be under way.
void Engine::take(Lane& lane, std::vector<Piece*>& out) {
    while (!lane.waiting.empty() && lane.flying < lane.limit) {
        Piece& front = lane.waiting.front();
        if (front.ticket->error != 0) {
            account(*front.ticket, front.length);  // the transfer failed already: no more of it
            front.length = 0;
        } else {
            out.push_back(new Piece(front.cut(block_bytes_)));
            ++lane.flying;
        }
        if (front.length == 0) lane.waiting.pop_front();
    }
}

void Engine::serve() {
    prctl(PR_SET_NAME, "ds-aio");
    std::vector<Piece*> direct, plain;
    std::vector<Result> results;
    for (;;) {
        direct.clear();
        plain.clear();
        results.clear();
        if (queue_) queue_->reap(results);
        for (const Result& each : results) {
            if (each.status == each.piece->length) {
                finish(each.piece, 0);
            } else {
                if (each.status > 0) each.piece->advance(each.status);
                plain.push_back(each.piece);  // short or refused: a thread finds out
            }
        }
        {
            std::lock_guard<std::mutex> lock(mutex_);
            take(direct_, direct);
            take(plain_, plain);
            if (closing_ && direct_.flying + plain_.flying == 0) return;
        }
        if (queue_)
            queue_->send(direct, plain);
        else
            pool_->push(direct);
        pool_->push(plain);
        uint64_t count;
        while (read(wake_, &count, sizeof count) < 0 && errno == EINTR) {
        }
    }
}

}  // namespace ds::aio

using ds::aio::Engine;
using ds::aio::Piece;

extern "C" {

// backend: 0 the best there is (DS_AIO_BACKEND in the environment decides), 1 io_uring, 2 libaio, 3 threads. queue_depth:
// pieces under way on the O_DIRECT descriptor, threads: through the page cache. block_bytes: a multiple of 4096, at most 1 GiB.
// Null, with *error = -errno, when that backend or a thread is not to be had (-EINVAL: an argument, or DS_AIO_BACKEND).
void* ds_aio_new(int backend, int queue_depth, int64_t block_bytes, int threads, int* error) {
    *error = 0;
    try {
        return new Engine(backend, queue_depth, block_bytes, threads);
    } catch (const std::system_error& refusal) {
        *error = -refusal.code().value();
    } catch (const std::bad_alloc&) {
        *error = -ENOMEM;
    }
    return nullptr;
}

int ds_aio_backend(void* engine) { return static_cast<Engine*>(engine)->backend(); }

// Starts reading (write = 0) or writing bytes of fd_plain at offset; fd_direct is the same file with O_DIRECT, or -1. Both
// descriptors and the memory stay valid until the ticket is waited for. Returns the ticket (> 0), or -errno: -ECHILD in a forked
// child. No order is kept between tickets.
int64_t ds_aio_submit(void* engine, int write, int fd_direct, int fd_plain, int64_t offset, void* data, int64_t bytes) {
    Engine* self = static_cast<Engine*>(engine);
    if (self->foreign()) return -ECHILD;
    if (offset < 0 || bytes < 0 || offset > INT64_MAX - bytes) return -EINVAL;
    try {
        return self->submit(Piece{nullptr, write != 0, fd_plain, fd_plain, static_cast<char*>(data), offset, bytes, bytes, {}}, fd_direct);
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    }
}

// 0, or the first failure as -errno: -ENODATA where the file ends before the range, -ENOSPC where it cannot grow, -EINVAL for a
// ticket that was waited for already, -ECHILD in a forked child.
int ds_aio_wait(void* engine, int64_t ticket) {
    Engine* self = static_cast<Engine*>(engine);
    return self->foreign() ? -ECHILD : self->wait(ticket);
}

// 1 done, 0 not yet; errors as ds_aio_wait.
int ds_aio_done(void* engine, int64_t ticket) {
    Engine* self = static_cast<Engine*>(engine);
    return self->foreign() ? -ECHILD : self->done(ticket);
}

// Finishes every transfer, then ends the engine. A forked child has nothing to end.
void ds_aio_free(void* engine) {
    Engine* self = static_cast<Engine*>(engine);
    if (self != nullptr && !self->foreign()) delete self;
}
}
