#include "cli/plan_page.hpp"

#include "cli/plan_page_files.hpp"
#include "train/records/page.hpp"

namespace capstan::cli {

std::string plan_page_html(const PlanPage& page) {
  // The picture is drawn already: it stands in the page as it is.
  const std::string body =
      std::string(plan_body()) + "<div id=\"timeline-picture\" hidden>\n" + page.timeline + "</div>\n";
  const OrderedJson data = {{"title", page.title},   {"subtitle", page.subtitle}, {"plan", page.plan},
                            {"search", page.search}, {"links", page.links},       {"run", page.budget}};
  return records::page_html({"capstan plan " + page.title, body, plan_script(), dump_json(data)});
}

}  // namespace capstan::cli
