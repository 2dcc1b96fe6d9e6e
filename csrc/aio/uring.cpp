// io_uring, by system call: no library is needed.

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "aio/engine.h"

#if defined(__has_include)
#if __has_include(<linux/io_uring.h>) && defined(__NR_io_uring_setup)
#define DS_HAVE_URING 1
#include <linux/io_uring.h>
#endif
#endif

namespace ds::aio {

#ifdef DS_HAVE_URING

namespace {

// A shared mapping of the ring, unmapped with the object.
class Mapping {
   public:
    Mapping() = default;
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    ~Mapping() {
        if (start_ != MAP_FAILED) munmap(start_, bytes_);
    }
    bool open(int fd, size_t bytes, off_t where) {
        bytes_ = bytes;
        start_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, where);
        return start_ != MAP_FAILED;
    }
    template <class T>
    T* at(size_t bytes) const {
        return reinterpret_cast<T*>(static_cast<char*>(start_) + bytes);
    }

   private:
    void* start_ = MAP_FAILED;
    size_t bytes_ = 0;
};

class Uring final : public Queue {
   public:
    ~Uring() override {
        if (fd_ >= 0) close(fd_);
    }

    // 0 or -errno
    int open(int depth, int wake) {
        io_uring_params params;
        memset(&params, 0, sizeof params);
        fd_ = static_cast<int>(syscall(__NR_io_uring_setup, depth, &params));
        if (fd_ < 0) return -errno;
        const size_t sent = params.sq_off.array + params.sq_entries * sizeof(unsigned);
        const size_t reaped = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
        if (!sent_.open(fd_, sent, IORING_OFF_SQ_RING) || !reaped_.open(fd_, reaped, IORING_OFF_CQ_RING) ||
            !entries_.open(fd_, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES))
            return -errno;
        tail_ = sent_.at<unsigned>(params.sq_off.tail);
        mask_ = *sent_.at<unsigned>(params.sq_off.ring_mask);
        order_ = sent_.at<unsigned>(params.sq_off.array);
        done_head_ = reaped_.at<unsigned>(params.cq_off.head);
        done_tail_ = reaped_.at<unsigned>(params.cq_off.tail);
        done_mask_ = *reaped_.at<unsigned>(params.cq_off.ring_mask);
        done_ = reaped_.at<io_uring_cqe>(params.cq_off.cqes);
        room_ = params.sq_entries;
        // a sandbox may allow the set-up and refuse the rest: better known now
        if (syscall(__NR_io_uring_register, fd_, IORING_REGISTER_EVENTFD, &wake, 1) != 0) return -errno;
        return try_nothing();
    }

    void send(const std::vector<Piece*>& pieces, std::vector<Piece*>& refused) override {
        for (size_t first = 0; first < pieces.size();) {
            const size_t count = std::min<size_t>(pieces.size() - first, room_);
            for (size_t i = 0; i < count; ++i) fill(next(), *pieces[first + i]);
            for (unsigned left = enter(static_cast<unsigned>(count)); left > 0; --left) refused.push_back(pieces[first + count - left]);
            first += count;
        }
    }

    void reap(std::vector<Result>& results) override {
        unsigned head = *done_head_;
        const unsigned tail = __atomic_load_n(done_tail_, __ATOMIC_ACQUIRE);
        for (; head != tail; ++head) {
            const io_uring_cqe& entry = done_[head & done_mask_];
            results.push_back({reinterpret_cast<Piece*>(static_cast<uintptr_t>(entry.user_data)), entry.res});
        }
        __atomic_store_n(done_head_, head, __ATOMIC_RELEASE);
    }

   private:
    // The next free entry; the kernel reads the tail only inside enter(), so it may move before the entry is filled.
    io_uring_sqe& next() {
        const unsigned slot = *tail_ & mask_;
        order_[slot] = slot;
        __atomic_store_n(tail_, *tail_ + 1, __ATOMIC_RELEASE);
        io_uring_sqe& entry = entries_.at<io_uring_sqe>(0)[slot];
        memset(&entry, 0, sizeof entry);
        return entry;
    }

    void fill(io_uring_sqe& entry, Piece& piece) {
        // the vectored operations exist since the first io_uring
        piece.vector = {piece.data, static_cast<size_t>(piece.length)};
        entry.opcode = piece.write ? IORING_OP_WRITEV : IORING_OP_READV;
        entry.fd = piece.fd;
        entry.off = piece.offset;
        entry.addr = reinterpret_cast<uintptr_t>(&piece.vector);
        entry.len = 1;
        entry.user_data = reinterpret_cast<uintptr_t>(&piece);
    }

    // Submits the last count entries. Returns how many of them, at the end, the kernel did not take; they are withdrawn.
    unsigned enter(unsigned count) {
        while (count > 0) {
            const long taken = syscall(__NR_io_uring_enter, fd_, count, 0, 0, nullptr, 0);
            if (taken > 0) {
                count -= static_cast<unsigned>(taken);
            } else if (taken == 0 || errno != EINTR) {
                __atomic_store_n(tail_, *tail_ - count, __ATOMIC_RELEASE);
                return count;
            }
        }
        return 0;
    }

    int try_nothing() {
        io_uring_sqe& entry = next();
        entry.opcode = IORING_OP_NOP;
        errno = EBUSY;
        if (enter(1) != 0) return -errno;
        std::vector<Result> results;
        reap(results);  // nothing is done inside the call
        return results.size() == 1 && results[0].status == 0 ? 0 : -ENOSYS;
    }

    int fd_ = -1;
    Mapping sent_, reaped_, entries_;
    unsigned *tail_ = nullptr, *order_ = nullptr, *done_head_ = nullptr, *done_tail_ = nullptr;
    unsigned room_ = 0, mask_ = 0, done_mask_ = 0;
    io_uring_cqe* done_ = nullptr;
};

}  // namespace

std::unique_ptr<Queue> make_uring(int depth, int wake, int* error) {
    auto queue = std::make_unique<Uring>();
    *error = queue->open(depth, wake);
    if (*error != 0) return nullptr;
    return queue;
}

#else

std::unique_ptr<Queue> make_uring(int, int, int* error) {
    *error = -ENOSYS;
    return nullptr;
}

#endif

}  // namespace ds::aio
