// Blocking transfers and the threads that do them.

#include <errno.h>
#include <unistd.h>

#include <chrono>
#include <system_error>

#include "aio/engine.h"

namespace ds::aio {

namespace {

constexpr int kPatience = 1000;  // times a millisecond that a descriptor may say EAGAIN; a file on disk never does

}  // namespace

int transfer(Piece& piece) {
    int fd = piece.fd;
    int refusals = 0;
    while (piece.length > 0) {
        // a short count may end anywhere; what is left of that block goes through the page cache
        if (!piece.aligned()) fd = piece.plain;
        const ssize_t count = piece.write ? pwrite(fd, piece.data, piece.length, piece.offset)
                                          : pread(fd, piece.data, piece.length, piece.offset);
        if (count > 0) {
            piece.advance(count);
            refusals = 0;
        } else if (count == 0) {
            return piece.write ? -ENOSPC : -ENODATA;
        } else if (errno == EAGAIN && ++refusals < kPatience) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        } else if (errno == EINVAL && fd != piece.plain) {
            fd = piece.plain;  // the filesystem took O_DIRECT when the file was opened and refuses it now
        } else if (errno != EINTR) {
            return -errno;
        }
    }
    return 0;
}

Pool::~Pool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

bool Pool::grow() {
    try {
        threads_.push_back(quiet_thread([this] { work(); }));
        return true;
    } catch (const std::system_error&) {
        return false;  // a limit on threads; those that exist go on
    }
}

void Pool::push(const std::vector<Piece*>& pieces) {
    for (Piece* piece : pieces) {
        bool served = true;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (idle_ <= jobs_.size() && threads_.size() < limit_) served = grow() || !threads_.empty();
            if (served) jobs_.push_back(piece);
        }
        if (served) {
            changed_.notify_one();
        } else {
            engine_.finish(piece, transfer(*piece));
            engine_.wake();
        }
    }
}

void Pool::work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        ++idle_;
        changed_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
        --idle_;
        if (jobs_.empty()) return;
        Piece* piece = jobs_.front();
        jobs_.pop_front();
        lock.unlock();
        engine_.finish(piece, transfer(*piece));
        engine_.wake();
        lock.lock();
    }
}

}  // namespace ds::aio
