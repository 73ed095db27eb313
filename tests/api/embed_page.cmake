# Fails unless PAGE holds the text of each of FILES (separated by `|`) as a code block,
# indented by four columns.
file(READ "${PAGE}" page)
string(REPLACE "|" ";" files "${FILES}")
foreach(path IN LISTS files)
  file(READ "${path}" text)
  string(REGEX REPLACE "\n$" "" text "${text}")
  string(REPLACE "\n" "\n    " text "\n${text}")
  string(REPLACE "\n    \n" "\n\n" text "${text}")
  string(FIND "${page}" "${text}" found)
  if(found EQUAL -1)
    message(FATAL_ERROR "${PAGE} does not show ${path} as it is")
  endif()
endforeach()
