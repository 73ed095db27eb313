#include "comm/exchange.hpp"

#include "base/error.hpp"

namespace capstan::comm {

HostView& Exchange::view(const Tensor& tensor, HostView::Contents contents) {
  auto& views = contents == HostView::Contents::read ? sent_ : received_;
  return views.emplace_back(tensor, contents);
}

void Exchange::send(const Tensor& data, int to, int tag) {
  if (data.device().is_meta()) {
    planned_.push_back(data);
    if (group_->plans()) group_->start_send(nullptr, data.bytes(), to, tag);
    return;
  }
  std::byte* bytes = view(data, HostView::Contents::read).data();
  works_.push_back(group_->start_send(bytes, data.bytes(), to, tag));
}

void Exchange::receive(const Tensor& data, int from, int tag) {
  if (data.device().is_meta()) return planned_.push_back(data);
  std::byte* bytes = view(data, HostView::Contents::undefined).data();
  works_.push_back(group_->start_receive(bytes, data.bytes(), from, tag));
}

void Exchange::all_gather(const Tensor& mine, const Tensor& all) {
  CAPSTAN_ASSERT(all.bytes() == mine.bytes() * group_->size(),
                 "all_gather of " + mine.text() + " into " + all.text());
  if (mine.device().is_meta()) {
    planned_.insert(planned_.end(), {mine, all});
    if (group_->plans()) group_->start_all_gather(nullptr, nullptr, mine.bytes());
    return;
  }
  const std::byte* from = view(mine, HostView::Contents::read).data();
  std::byte* to = view(all, HostView::Contents::undefined).data();
  works_.push_back(group_->start_all_gather(from, to, mine.bytes()));
}

void Exchange::all_to_all(const Tensor& data, const Tensor& received) {
  CAPSTAN_ASSERT(data.bytes() == received.bytes() && data.bytes() % group_->size() == 0,
                 "all_to_all of " + data.text() + " into " + received.text());
  if (data.device().is_meta()) {
    planned_.insert(planned_.end(), {data, received});
    if (group_->plans()) group_->start_all_to_all(nullptr, nullptr, data.bytes() / group_->size());
    return;
  }
  const std::byte* from = view(data, HostView::Contents::read).data();
  std::byte* to = view(received, HostView::Contents::undefined).data();
  works_.push_back(group_->start_all_to_all(from, to, data.bytes() / group_->size()));
}

bool Exchange::done() {
  for (const WorkHandle& work : works_)
    if (!work->done()) return false;
  return true;
}

void Exchange::wait() {
  for (const WorkHandle& work : works_) work->wait();
  works_.clear();
  for (HostView& received : received_) received.store();
  received_.clear();
  sent_.clear();
  planned_.clear();
}

}  // namespace capstan::comm
