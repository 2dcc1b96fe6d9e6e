// The kernel's older asynchronous IO (io_setup, io_submit), by system call: no library is needed.

#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "aio/engine.h"

#if defined(__has_include)
#if __has_include(<linux/aio_abi.h>) && defined(__NR_io_setup)
#define DS_HAVE_LIBAIO 1
#include <linux/aio_abi.h>
#endif
#endif

namespace ds::aio {

#ifdef DS_HAVE_LIBAIO

namespace {

class Libaio final : public Queue {
   public:
    Libaio(aio_context_t context, int depth, int wake) : context_(context), wake_(wake), events_(depth) {}
    ~Libaio() override { syscall(__NR_io_destroy, context_); }

    void send(const std::vector<Piece*>& pieces, std::vector<Piece*>& refused) override {
        blocks_.assign(pieces.size(), iocb{});
        pointers_.clear();
        for (size_t i = 0; i < pieces.size(); ++i) {
            const Piece& piece = *pieces[i];
            iocb& block = blocks_[i];
            block.aio_data = reinterpret_cast<uintptr_t>(&piece);
            block.aio_lio_opcode = piece.write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
            block.aio_fildes = piece.fd;
            block.aio_buf = reinterpret_cast<uintptr_t>(piece.data);
            block.aio_nbytes = piece.length;
            block.aio_offset = piece.offset;
            block.aio_flags = IOCB_FLAG_RESFD;
            block.aio_resfd = wake_;
            pointers_.push_back(&block);
        }
        for (size_t sent = 0; sent < pieces.size();) {
            const long count = syscall(__NR_io_submit, context_, pieces.size() - sent, pointers_.data() + sent);
            if (count > 0)
                sent += count;
            else if (count == 0 || errno != EINTR)
                refused.push_back(pieces[sent++]);  // the error is of the first one
        }
    }

    void reap(std::vector<Result>& results) override {
        timespec now{0, 0};
        long count;
        do {
            count = syscall(__NR_io_getevents, context_, 0, events_.size(), events_.data(), &now);
            for (long i = 0; i < count; ++i)
                results.push_back({reinterpret_cast<Piece*>(static_cast<uintptr_t>(events_[i].data)), events_[i].res});
        } while (count == static_cast<long>(events_.size()) || (count < 0 && errno == EINTR));
    }

   private:
    aio_context_t context_;
    int wake_;
    std::vector<io_event> events_;
    std::vector<iocb> blocks_;
    std::vector<iocb*> pointers_;
};

}  // namespace

std::unique_ptr<Queue> make_libaio(int depth, int wake, int* error) {
    aio_context_t context = 0;
    if (syscall(__NR_io_setup, depth, &context) != 0) {
        *error = -errno;
        return nullptr;
    }
    return std::make_unique<Libaio>(context, depth, wake);
}

#else

std::unique_ptr<Queue> make_libaio(int, int, int* error) {
    *error = -ENOSYS;
    return nullptr;
}

#endif

}  // namespace ds::aio
